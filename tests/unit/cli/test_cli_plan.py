"""`llmserve plan`: the figures on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_files import write_gguf
from llmserve import LLM, cli

LLAMA = ("--shape", "80x8x128", "--weights", "140GB")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_it_plans_a_checkpoint_as_llm_does(
    capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    shown = json.loads(run(capsys, str(checkpoint), "--json", "--kv-cache-memory-bytes", "1MiB"))
    plan = LLM.plan(checkpoint, kv_cache_memory_bytes=2**20)
    assert shown["kv_cache_bytes"] == plan.kv_cache_bytes
    assert shown["weight_bytes"] == plan.weight_bytes
    text = run(capsys, str(checkpoint), "--contexts", "64,128", "--bandwidth", "20GB/s")
    assert "users at 64  users at 128" in text
    assert "tok/s each alone" in text


def test_it_says_what_does_not_fit(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    text = run(capsys, str(checkpoint), "--memory", "1MiB")
    assert "does not fit   the model needs" in text


def test_users_on_four_cards(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *LLAMA, "--gpu-memory", "4x80GiB", "--overhead", "0.1")
    users = {line.split()[0]: line.split()[-1] for line in text.splitlines() if "327680" in line}
    assert users["bfloat16"] == "126"
    assert "327,680 bytes a token" in text
    rows = json.loads(
        run(capsys, *LLAMA, "--gpu-memory", "4x80GiB", "--overhead", "0.1", "--json")
    )["capacity"]["rows"]
    by_dtype = {row["dtype"]: row["num_users"] for row in rows}
    assert (by_dtype["fp8"], by_dtype["int4"]) == ([252], [504])


def test_the_bounds_of_a_decode(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *LLAMA, "--gpu-memory", "180GB", "--bandwidth", "3.35TB/s", "--rate", "1000")
    assert "decode, one user, weights alone: 23.9 tok/s" in text
    assert "weights alone: 42 users" in text
    assert "at 4096: 70 users, 29 fit: out of reach" in text


def test_price_link_and_crossover(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(
        capsys,
        *LLAMA,
        *("--contexts", "8192,131072", "--rate", "2500", "--price", "3", "--link", "200GB/s"),
        *("--bandwidth", "2TB/s", "--flops", "312TFLOP/s"),
    )
    assert "a million tokens at 2500 tok/s: 0.33" in text
    assert "KV hand-over at 8192: 13.4 ms" in text
    assert "arithmetic bounds above: 156 operations a byte" in text
    assert "at 131072    42,949,672,960 bytes" in text
    assert "no number does" in text


def test_a_config_alone_is_enough(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    config = str(checkpoint / "config.json")
    assert "LlamaForCausalLM" in run(capsys, config)
    shown = json.loads(run(capsys, config, "--gpu-memory", "1GiB", "--json"))
    assert shown["capacity"]["weight_bytes"] == LLM.plan(checkpoint).weight_bytes


def test_users_on_a_card_of_any_form_of_a_checkpoint(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", checkpoint)
    flags = ("--gpu-memory", "1GiB", "--weights", "1MB", "--json")
    expected = run(capsys, str(checkpoint), *flags)
    for model in (file, tmp_path, checkpoint / "model.safetensors"):
        assert run(capsys, str(model), *flags) == expected
    shown = json.loads(run(capsys, str(file), "--gpu-memory", "1GiB", "--json"))
    assert shown["capacity"]["weight_bytes"] == LLM.plan(file).weight_bytes


def test_the_largest_shape_has_exact_figures(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--gpu-memory", "4x1000PB", "--contexts", "4096,2147483647", "--json")
    shown = json.loads(run(capsys, "--shape", "4096x65536x65536", *flags))
    assert shown["kv_bytes_per_token"] == 2 * 4096 * 65536 * 65536 * 2
    for row in shown["capacity"]["rows"]:
        block_bytes = row["bytes_per_token"] * 16
        assert row["num_blocks"] == shown["capacity"]["kv_cache_bytes"] // block_bytes


def test_a_file_that_cannot_be_written_is_a_users_error(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for flag, file, message in (
        ("--html", tmp_path / "no" / "p.html", "No such file or directory"),
        ("--plot", tmp_path / "no" / "p.png", "No such file or directory"),
        ("--plot", tmp_path / "p.xyz", "Format 'xyz' is not supported"),
    ):
        assert cli.main(["plan", str(checkpoint), flag, str(file)]) == 2
        assert f"llmserve: {flag} {file}: {message}" in capsys.readouterr().err


def test_tables_and_plots_go_to_files(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    page, plot = tmp_path / "plan.html", tmp_path / "plan.png"
    run(capsys, str(checkpoint), "--html", str(page), "--plot", str(plot))
    assert "<table>" in page.read_text()
    assert plot.stat().st_size > 1000


ERRORS = [
    (("--gpu-memory", "1GiB"), "--gpu-memory needs a MODEL or --shape"),
    (("--shape", "80x8"), "--shape must be LAYERSxKV_HEADSxHEAD_DIM"),
    (("--shape", "1x1x8", "--gpu-memory", "much"), "--gpu-memory must be a size such as"),
    (("--shape", "1x1x8", "--bandwidth", "1GB/s"), "pass their bytes (--weights)"),
    (("--shape", "1x1x8", "--block-size", "8"), "--block-size plans for this machine"),
    (("--shape", "1x1x8", "--dtype", "float32"), "--dtype plans for this machine"),
    (("m", "--gpu-memory", "1GiB", "--weights", "1GB", "--dtype", "float32"), "--dtype plans for"),
    (("--shape", "1x1x8", "m"), "plan takes a MODEL or --shape, not both"),
    (("--shape", "1x1x8", "--html", "x"), "--html and --plot need a MODEL or --gpu-memory"),
    (("m", "--price", "3"), "--price goes with --gpu-memory or --shape"),
    (("m", "--contexts", "a"), "--contexts must be numbers of tokens"),
    (("/nowhere",), "model must be a checkpoint directory"),
    (("--shape", "1x99999999x8"), "num_kv_heads must be between 1 and 65536, got 99999999"),
    (("--shape", "1x1x65537"), "head_dim must be between 1 and 65536, got 65537"),
    (("--shape", "1x1x8", "--rate", "9"), "users for a rate need a bandwidth (--bandwidth)"),
    (("--shape", "1x1x8", "--price", "3"), "a price of tokens needs how many come a second"),
    (("--shape", "1x1x8", "--flops", "1TFLOP/s"), "a crossover with arithmetic needs a bandwidth"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_a_users_error_is_one_line_and_exits_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err
