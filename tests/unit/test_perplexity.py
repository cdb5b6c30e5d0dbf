"""`llmserve eval perplexity`, against transformers and by its windows."""

from __future__ import annotations

import json
import math

import pytest
from checkpoints import VOCAB_SIZE, checkpoint, reference_model
from llmserve import LLM, InvalidArgument, cli
from llmserve.perplexity import measure_perplexity, windows_of

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


def test_the_command_prints_what_quantization_changes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "perplexity", "--max-tokens", "1500", "--quantization", "none,int8,int4"]
    assert cli.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["quantization"] for row in rows] == ["none", "int8", "int4"]
    assert rows[0]["change"] == 0
    assert abs(rows[1]["change"]) < 0.01
    assert 0 < rows[2]["change"] < 0.05
    assert rows[0]["weight_bytes"] > rows[1]["weight_bytes"] > rows[2]["weight_bytes"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["quantization", "perplexity", "change", "tokens", "weights"]
    assert [line.split()[0] for line in lines[1:]] == ["none", "int8", "int4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quantization", "int3"], "quantization 'int3' is not supported; use one of"),
        (["--text", "no-such-file"], "--text no-such-file: expected UTF-8 text"),
        (["--model", "x"], "--model needs a text of its own: pass --text FILE"),
        (["--context", "1"], "--context must be between 2 and"),
        (["--context", "64", "--stride", "64"], "--stride must be between 1 and 63"),
    ],
)
def test_bad_options_say_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "perplexity", *arguments]) == 2
    assert message in capsys.readouterr().err
