"""`llmserve eval perplexity`, against transformers and by its windows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from checkpoints import VOCAB_SIZE, checkpoint, reference_model
from llmserve import LLM, InvalidArgument, cli
from llmserve.bench.perplexity import measure_perplexity, windows_of
from llmserve.checkpoint.model_files import demo_model_path

TOKENS = [(7 * i * i + 3 * i) % (VOCAB_SIZE - 3) + 3 for i in range(300)]


@pytest.mark.parametrize(("context", "stride"), [(2, 1), (6, 3), (7, 6), (50, 10), (400, 200)])
def test_windows_count_each_token_but_the_first_once(context: int, stride: int) -> None:
    scored: list[int] = []
    for window in windows_of(301, context, stride):
        assert window.end - window.begin <= context
        assert window.begin < window.scored
        scored += range(window.scored, window.end)
    assert scored == list(range(1, 301))


def test_perplexity_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    path = checkpoint("llama")
    with LLM(path, dtype="float32", num_gpu_blocks_override=64) as llm:
        seen: list[int] = []
        got = measure_perplexity(llm, TOKENS, context=100, stride=40, on_window=seen.append)
    losses = []
    with torch.no_grad():
        for window in windows_of(len(TOKENS), 100, 40):
            ids = torch.tensor([TOKENS[window.begin : window.end]])
            logprobs = reference_model(path)(ids).logits[0].log_softmax(-1)
            for i in range(window.scored - window.begin, ids.shape[1]):
                losses.append(-logprobs[i - 1, ids[0, i]].item())
    assert sum(seen) == got.num_tokens == len(losses) == 299
    assert got.mean_nll == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert got.value == pytest.approx(math.exp(got.mean_nll))
    assert 0 < got.standard_error < 1


@pytest.mark.parametrize(
    ("tokens", "context", "stride", "message"),
    [
        (TOKENS, 1, 1, "context must be at least 2, got 1"),
        (TOKENS, 10, 10, "stride must be between 1 and context - 1, got 10"),
        (TOKENS[:1], 10, 5, "at least 2 tokens"),
    ],
)
def test_sizes_out_of_range_are_refused(
    tokens: list[int], context: int, stride: int, message: str
) -> None:
    with (
        LLM(checkpoint("llama"), num_gpu_blocks_override=64) as llm,
        pytest.raises(InvalidArgument, match=message),
    ):
        measure_perplexity(llm, tokens, context=context, stride=stride)


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert cli.main(["eval", "perplexity", "--json", *arguments]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


FEW = ("--max-tokens", "1500")


def test_changes_are_against_the_model_without_quantization(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (plain,) = rows_of(capsys, *FEW)
    assert (plain["quantization"], plain["change"]) == (None, None)
    base, int4, int8 = rows_of(capsys, *FEW, "--quantization", "int4,int8")
    assert [row["quantization"] for row in (base, int4, int8)] == ["none", "int4", "int8"]
    assert base["perplexity"] == plain["perplexity"]
    assert base["change"] == 0
    assert int4["change"] == int4["perplexity"] / plain["perplexity"] - 1
    assert 0 < int4["change"] < 0.05
    assert 0 != abs(int8["change"]) < 0.01
    assert base["weight_bytes"] > int8["weight_bytes"] > int4["weight_bytes"]


@pytest.mark.parametrize("names", ["int8", "int8,none", "none,int8,int8"])
def test_the_base_is_measured_once_and_comes_first(
    names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "perplexity", "--max-tokens", "300", "--quantization", names]) == 0
    head, base, int8, note = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["quantization", "perplexity", "change", "tokens", "weights"]
    assert (base[0], base[2]) == ("none", "base")
    assert int8[0] == "int8"
    assert int8[2].endswith("%")
    assert " ".join(note) == "base: the same text with weights in bfloat16"


def test_an_unknown_name_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[object] = []
    monkeypatch.setattr("llmserve.cli.eval._measure", lambda *given: measured.append(given))
    assert cli.main(["eval", "perplexity", "--quantization", "int8,int3"]) == 2
    assert "quantization 'int3' is not supported" in capsys.readouterr().err
    assert not measured


def test_any_text_is_measured_as_it_is_encoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Once upon a time there was a café by the sea.\n\n“Zoë,” said Tim, “is it open?”\n" * 9
    path = tmp_path / "book.txt"
    path.write_text(text, encoding="utf-8")
    arguments = ("--text", str(path), "--context", "64", "--stride", "48")
    assert cli.main(["eval", "perplexity", "--json", *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text_bytes"] == len(text.encode())
    (row,) = result["rows"]
    with LLM(demo_model_path()) as llm:
        token_ids = llm.get_tokenizer().encode(text)
        expected = measure_perplexity(llm, token_ids, context=64, stride=48)
    assert (row["num_tokens"], row["mean_nll"]) == (len(token_ids) - 1, expected.mean_nll)
    assert row["perplexity"] == expected.value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantization", "int3"], "quantization 'int3' is not supported; use one of"),
        (["--text", "no-such-file"], "--text no-such-file: expected UTF-8 text"),
        (["--model", "x"], "MODEL needs a text of its own: pass --text FILE"),
        (["--context", "1"], "--context must be between 2 and"),
        (["--context", "64", "--stride", "64"], "--stride must be between 1 and 63"),
        (["--max-model-len", "2"], "max_model_len is 2; pass --max-model-len 3 or more"),
    ],
)
def test_bad_options_say_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "perplexity", *arguments]) == 2
    assert message in capsys.readouterr().err
