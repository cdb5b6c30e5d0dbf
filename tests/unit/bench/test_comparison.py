"""`llmserve eval compare` and `choices`: against torch, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import checkpoint, reference_model
from llmserve import LLM, InvalidArgument, cli, demo_model_path
from llmserve.bench.divergence import measure_divergence
from llmserve.bench.multiple_choice import Question, measure_choices, read_questions
from llmserve.bench.perplexity import measure_perplexity, windows_of

TOKENS = [(7 * i * i + 3 * i) % 317 + 3 for i in range(150)]
SIZES = {"context": 60, "stride": 25}


def load(path: Path) -> LLM:
    return LLM(path, dtype="float32", num_gpu_blocks_override=64)


def test_divergence_is_that_of_transformers_logits() -> None:
    torch = pytest.importorskip("torch")
    paths = [checkpoint("llama"), checkpoint("llama", seed=1)]
    with load(paths[0]) as base, load(paths[1]) as other:
        got = measure_divergence(base, other, TOKENS, **SIZES)
        alone = measure_perplexity(other, TOKENS, **SIZES)
    kl, same = [], []
    with torch.no_grad():
        for window in windows_of(len(TOKENS), 60, 25):
            ids = torch.tensor([TOKENS[window.begin : window.end]])
            p, q = (reference_model(path)(ids).logits[0].log_softmax(-1) for path in paths)
            rows = slice(window.scored - window.begin - 1, ids.shape[1] - 1)
            kl.append((p.exp() * (p - q)).sum(-1)[rows])
            same.append((p.argmax(-1) == q.argmax(-1))[rows].float())
    assert got.mean_kl == pytest.approx(torch.cat(kl).mean().item(), rel=1e-3)
    assert got.kl_99 == pytest.approx(torch.cat(kl).quantile(0.99).item(), rel=1e-2)
    assert got.same_top == pytest.approx(torch.cat(same).mean().item(), abs=0.01)
    assert got.other.mean_nll == pytest.approx(alone.mean_nll, abs=1e-5)
    assert got.base.num_tokens == got.other.num_tokens == 149


def test_a_model_does_not_differ_from_itself() -> None:
    with load(checkpoint("llama")) as llm:
        got = measure_divergence(llm, llm, TOKENS, **SIZES)
    assert (got.mean_kl, got.same_top, got.change, got.change_error) == (0, 1, 0, 0)


def test_other_vocabularies_are_refused() -> None:
    with (
        load(checkpoint("llama")) as base,
        load(checkpoint("llama", vocab_size=352)) as other,
        pytest.raises(InvalidArgument, match="vocabularies of 320 and 352"),
    ):
        measure_divergence(base, other, TOKENS, **SIZES)


QUESTIONS = [
    Question("Once upon", (" a time", " the zebra", " 5"), 0),
    Question("Once upon a time, there was a", (" 17", " little fox", " ,"), 1),
]


def test_the_likeliest_choice_is_chosen_as_torch_has_it() -> None:
    torch = pytest.importorskip("torch")
    model = reference_model(demo_model_path())
    with LLM(demo_model_path(), dtype="float32", num_gpu_blocks_override=128) as llm:
        seen: list[int] = []
        result = measure_choices(llm, QUESTIONS, on_question=seen.append)
        encode = llm.get_tokenizer().encode
    for question, chosen in zip(QUESTIONS, result.chosen, strict=True):
        sums = []
        for choice in question.choices:
            begin = len(encode(question.prompt))
            ids = encode(question.prompt + choice)
            with torch.no_grad():
                rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(rows[i - 1, ids[i]].item() for i in range(begin, len(ids))))
        assert chosen == int(np.argmax(sums))
    assert (result.accuracy, result.num_questions, seen) == (1.0, 2, [1, 1])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: "),
        ("[]", "expected an object, got list"),
        ('{"choices": ["a", "b"], "answer": 0}', "expected a text in prompt or question"),
        ('{"prompt": "x", "choices": ["a"], "answer": 0}', "expected two texts or more"),
        ('{"prompt": "x", "choices": ["a", ""], "answer": 0}', "expected two texts or more"),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": 2}', "from 0 to 1, got 2"),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": true}', "got True"),
        ('{"prompt": "x", "choices": ["a", "b"], "answer": "c"}', "got 'c'"),
        ("", "there is none"),
    ],
)
def test_lines_that_are_no_questions_are_refused(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidArgument, match=message):
        read_questions(path)


def test_the_commands_print_a_table_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "compare", "int8", "int4", "--max-tokens", "600", "--num-threads", "1"]
    assert cli.main([*words, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["base", "int8", "int4"]
    assert rows[0]["change"] is None
    assert 0 < rows[1]["mean_kl"] < rows[2]["mean_kl"] < 0.1
    assert rows[2]["weight_bytes"] < rows[1]["weight_bytes"] < rows[0]["weight_bytes"]
    assert all(row["decode_per_s"] > 0 for row in rows)
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "Once upon", "choices": [" a time", " zebra"], "answer": 0}\n')
    assert cli.main(["eval", "choices", "--questions", str(path)]) == 0
    assert "accuracy           100.0%" in capsys.readouterr().out
    assert cli.main(["eval", "compare", "int8", "--quantization", "int4"]) == 2
    assert "without --quantization" in capsys.readouterr().err
