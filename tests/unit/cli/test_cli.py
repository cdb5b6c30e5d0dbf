"""The `llmserve` command: what it writes where, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoints
import llmserve
import pytest
from cli_calls import Run
from llmserve import LLM, SamplingParams, demo_model_path
from llmserve.cli import console

# A start of Python, a tiny model and a few tokens take well under a second.
DEADLINE_S = 60.0


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmserve", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> str:
    return str(checkpoint)


def test_generate_writes_the_text_to_stdout_and_the_figures_to_stderr(model: str) -> None:
    done = run("generate", "--model", model, "--temperature", "0", "--max-tokens", "9", "hello")
    assert done.returncode == 0
    with LLM(model) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=9)
        (output,) = llm.generate("hello", params, use_tqdm=False)
    assert done.stdout == output.outputs[0].text + "\n"
    assert "9 new tokens" in done.stderr
    assert "tok/s" in done.stderr
    assert "\033" not in done.stdout + done.stderr


def test_generate_uses_the_demo_model_and_its_own_settings() -> None:
    done = run("generate", "Once upon a time", "--seed", "1")
    assert done.returncode == 0
    assert len(done.stdout.split()) > 10
    config = json.loads((demo_model_path() / "generation_config.json").read_text(encoding="utf-8"))
    assert 0 < int(done.stderr.split("new tokens")[0].split()[-1]) <= config["max_new_tokens"]


def test_generate_reads_the_prompt_from_stdin(model: str) -> None:
    arguments = ("generate", "--model", model, "--temperature", "0", "--quiet")
    assert run(*arguments, stdin="hello\n").stdout == run(*arguments, "hello").stdout


def test_quiet_leaves_stderr_empty(call: Run, model: str) -> None:
    assert call("generate", "--model", model, "--quiet", "hello").stderr == ""


def test_a_seed_repeats_and_stop_ends_the_text(call: Run, model: str) -> None:
    arguments = ("generate", "--model", model, "--seed", "5", "--quiet", "hello", "--ignore-eos")
    first = call(*arguments).stdout
    assert call(*arguments).stdout == first
    stop = first[3:6]
    assert call(*arguments, "--stop", stop).stdout == first[: first.index(stop)] + "\n"


def test_a_start_draws_a_seed_and_says_which(call: Run, model: str) -> None:
    arguments = ("generate", "--model", model, "--max-tokens", "40", "--ignore-eos", "hello")
    first, second = call(*arguments), call(*arguments)
    assert first.stdout != second.stdout
    seed = re.search(r", seed (\d+)\]", first.stderr)
    assert seed is not None
    assert call(*arguments, "--seed", seed[1]).stdout == first.stdout
    shown = call("serve", model, "--show-config").stdout.splitlines()
    assert "seed=None (default)" in shown


def test_n_writes_every_continuation_under_a_heading(call: Run, model: str) -> None:
    done = call(
        "generate", "--model", model, "--n", "3", "--seed", "2", "--max-tokens", "5", "hello"
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("--- ")] == [
        "--- 1 of 3",
        "--- 2 of 3",
        "--- 3 of 3",
    ]
    assert "15 new tokens" in done.stderr


USER_ERRORS = [
    (("generate", "--model", "/nowhere", "x"), "model must be a checkpoint directory"),
    (("generate", "--temperature", "-1", "x"), "temperature must be finite and at least 0, got -1"),
    (("generate", "--n", "1000", "x"), "n must be between 1 and 128, got 1000"),
    (("generate", "--dtype", "float8", "x"), "float8"),
    (("generate", ""), "prompt is empty"),
    (("generate", "--stop", "\udcff", "x"), "stop[0] has a lone surrogate"),
    (("generate", "--model", "m\udcff", "x"), r"path in UTF-8, got 'm\udcff'; rename it"),
    (("generate", "--tokenizer", "/nowhere", "x"), "tokenizer must be a folder with a tokenizer"),
    (("inspect", "/nowhere"), "model must be a checkpoint directory"),
    (("inspect", "m" * 300), "cannot be read: File name too long"),
]


@pytest.mark.parametrize(("arguments", "message"), USER_ERRORS)
def test_a_users_error_is_one_line_and_exits_2(
    call: Run, arguments: tuple[str, ...], message: str
) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stdout.strip() == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("llmserve: ")
    assert message in done.stderr


def test_bad_usage_shows_the_usage(call: Run) -> None:
    for arguments in ((), ("generate", "--max-tokens", "many", "x"), ("dance",)):
        done = call(*arguments)
        assert done.returncode == 2
        assert "usage: llmserve" in done.stderr


LATER = [
    (
        "--prefill-context-parallel-size",
        "2",
        "prefill_context_parallel_size=2 is not supported: ranks share a prompt by heads",
    ),
    ("--hf-config-path", "x", "hf_config_path='x' is not supported: the checkpoint's files say"),
    ("--trust-remote-code", None, "trust_remote_code=True is not supported: nothing of a check"),
]
COMMANDS = [
    ("serve",),
    ("generate", "x"),
    ("chat",),
    ("plan", "x"),
    ("bench", "latency"),
    ("eval", "perplexity"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_argument_whose_feature_is_not_there_is_refused_by_its_name(
    call: Run, command: tuple[str, ...]
) -> None:
    for flag, value, message in LATER:
        done = call(*command, flag, *([] if value is None else [value]))
        assert (done.returncode, done.stdout) == (2, "")
        name = " ".join(command).removesuffix(" x")
        assert done.stderr.startswith(f"llmserve: {name}: {message}")


def test_an_argument_whose_feature_is_not_there_is_taken_at_its_default(
    call: Run, model: str
) -> None:
    flags = ("--pipeline-parallel-size", "1", "--no-enable-lora", "--speculative-config", "{}")
    assert call("generate", "--model", model, *flags, "--quiet", "hello").returncode == 0


def test_fields_of_config_json_are_a_flag(call: Run, model: str) -> None:
    arguments = ("generate", "--model", model, "--temperature", "0", "--quiet", "hello")
    changed = call(*arguments, "--hf-overrides", '{"rms_norm_eps": 0.5}')
    assert changed.returncode == 0
    assert changed.stdout != call(*arguments).stdout
    assert "must be a JSON object, got '3'" in call(*arguments, "--hf-overrides", "3").stderr


@pytest.mark.parametrize(
    "flags", ["--num-threads --packed-cache-bytes", "--threads --packed-cache"]
)
def test_threads_and_the_packed_cache_have_the_same_names_everywhere(call: Run, flags: str) -> None:
    threads, packed = flags.split()
    given = (threads, "2000", packed, "2KiB")
    for command in (("generate", "x"), ("chat",), ("eval", "perplexity")):
        done = call(*command, *given)
        assert (done.returncode, "num_threads must be between 1 and 1024" in done.stderr) == (
            2,
            True,
        )
    lines = call("serve", threads, "3", *given[2:], "--show-config").stdout.splitlines()
    assert {"num_threads=3 (flag)", "packed_cache_bytes=2048 (flag)"} <= {*lines}
    done = call("serve", packed, "much")
    assert "must be a size such as 140GB or 4x80GiB, got 'much'" in done.stderr


UNKNOWN = [
    (("serve", "--prot=3"), "llmserve serve: error: there is no --prot; did you mean --port?"),
    (("bench", "latency", "--nmu-iters", "3"), "did you mean --num-iters?"),
    (("serve", "--tensor-paralel-size", "2"), "did you mean --tensor-parallel-size?"),
    (("generate", "--block-size", "8", "x"), "there is no --block-size; in Python LLM takes block"),
    (("generate", "--prompt-logprobs", "2", "x"), "there is no --prompt-logprobs; "),
    (("generate", "-x"), "there is no -x; llmserve generate --help lists what there is"),
    (("plan", "a", "b"), "llmserve plan: error: 'b' is more than the command takes"),
    (("generat", "x"), "llmserve: error: there is no command 'generat'; did you mean generate?"),
    (("chatt",), "there is no command 'chatt'; did you mean chat?"),
    (("lst",), "there is no command 'lst'; did you mean list?"),
    (("dance",), "llmserve: error: there is no command 'dance'; there are generate, chat, "),
    (("bench", "latncy"), "llmserve bench: error: there is no command 'latncy'; did you mean lat"),
    (("eval", "perplexity", "--xyzzy"), "llmserve eval perplexity --help lists what there is"),
]


@pytest.mark.parametrize(("arguments", "message"), UNKNOWN)
def test_an_unknown_option_is_answered_with_what_to_do(
    call: Run, arguments: tuple[str, ...], message: str
) -> None:
    done = call(*arguments)
    usage, error = done.stderr.splitlines()
    assert (done.returncode, usage.split(" [OPTION")[0]) == (2, "usage: " + error.split(":")[0])
    assert message in error


def test_help_has_examples(call: Run) -> None:
    for arguments in (
        ("--help",),
        ("generate", "--help"),
        ("chat", "--help"),
        ("inspect", "--help"),
    ):
        done = call(*arguments)
        assert done.returncode == 0
        assert "examples:" in done.stdout


def test_the_command_alone_lists_the_commands(call: Run) -> None:
    done = call()
    assert (done.returncode, done.stdout) == (2, "")
    assert "list the models that are downloaded" in done.stderr


def test_help_says_what_runs_and_on_what(call: Run) -> None:
    shown = call("--help").stdout
    assert "GGUF" in shown
    assert "CUDA" in shown


def test_version(call: Run) -> None:
    for flag in ("--version", "-V"):
        assert call(flag).stdout == f"llmserve {llmserve.__version__}\n"


def test_ctrl_c_stops_cleanly() -> None:
    # The reference takes many seconds for so many tokens.
    arguments = ("generate", "--ignore-eos", "--device", "ref", "--max-tokens", "1900", "hello")
    process = subprocess.Popen(
        [sys.executable, "-m", "llmserve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it is writing
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert stderr.strip().splitlines() == ["llmserve: interrupted"]
    assert time.monotonic() - start < DEADLINE_S / 4


def test_ctrl_c_while_the_commands_are_imported_stops_cleanly() -> None:
    interrupted = (
        "import importlib.abc, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'llmserve.cli.plan': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from llmserve.cli import main\n"
        "sys.exit(main(['cache', 'list']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", interrupted],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "llmserve: interrupted\n")


@pytest.mark.parametrize("streams", [">/dev/full", ">&-"])
@pytest.mark.parametrize("command", ["plan --shape 1x1x8", "generate --max-tokens 2 --quiet a"])
def test_output_that_cannot_be_written_is_one_line_and_exits_1(command: str, streams: str) -> None:
    done = shell(f"{command} {streams}")
    assert done.returncode == 1
    assert done.stderr.startswith("llmserve: [Errno ")
    assert len(done.stderr.splitlines()) == 1


def test_streams_that_are_closed_and_not_needed_are_no_error() -> None:
    assert shell("generate --max-tokens 2 a <&- 2>&-").returncode == 0
    assert shell("generate --max-tokens 2 <&-").stderr.startswith("llmserve: prompt is empty")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m llmserve {command}"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_tokenizer_may_be_given_beside_the_model(call: Run, model: str, tmp_path: Path) -> None:
    folder = checkpoints.copy_checkpoint(Path(model), tmp_path)
    (folder / "tokenizer.json").unlink()
    arguments = ("--max-tokens", "4", "--seed", "1", "--quiet", "hello")
    expected = call("generate", "--model", model, *arguments)
    assert call("generate", "--model", str(folder), *arguments).returncode == 2
    assert call("generate", "--model", str(folder), "--tokenizer", model, *arguments) == expected


def test_a_reader_that_leaves_is_no_error(model: str) -> None:
    generate = f"-m llmserve generate --model {model} --ignore-eos --quiet --seed 1 hello"
    command = f"{sys.executable} {generate} | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0
    assert done.stderr == b""


def test_inspect_shows_sizes_that_add_up(call: Run, model: str) -> None:
    report = json.loads(call("inspect", "--json", model).stdout)
    assert report["plan"]["total_bytes"] == sum(report["plan"]["group_bytes"].values())
    assert report["config"]["architecture"] == "LlamaForCausalLM"
    # keys and values, 2 layers, 2 KV heads of 12, 4 bytes
    assert report["plan"]["kv_bytes_per_token"] == 2 * 2 * 2 * 12 * 4
    text = call("inspect", model).stdout
    assert "LlamaForCausalLM" in text
    assert "384 bytes a token in float32" in text


def test_inspect_lists_tensors_on_request(call: Run, model: str) -> None:
    assert "model.embed_tokens.weight" not in call("inspect", model).stdout
    done = call("inspect", "--tensors", model)
    assert "model.embed_tokens.weight" in done.stdout
    assert "[320, 48]" in done.stdout


def test_inspect_shows_what_concerns_text(call: Run, model: str, tmp_path: Path) -> None:
    demo = str(demo_model_path())
    text = json.loads(call("inspect", "--json", demo).stdout)["text"]
    assert text["tokenizer"].startswith("BPE, decoder ByteLevel, ")
    assert text["chat_templates"] == ["default"]
    assert text["eos_tokens"] == ["<|endoftext|>", "<|im_end|>"]
    shown = call("inspect", demo).stdout
    assert "chat template  default" in shown
    assert "temperature=" in shown
    folder = checkpoints.copy_checkpoint(Path(model), tmp_path)
    (folder / "generation_config.json").unlink()
    assert "ends at        '</s>'" in call("inspect", str(folder)).stdout
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer      unusable: " in call("inspect", str(folder)).stdout
    (folder / "tokenizer.json").unlink()
    assert "tokenizer      none" in call("inspect", str(folder)).stdout


def test_what_a_model_writes_does_not_drive_the_terminal() -> None:
    assert console.printable("a\033[2Jb\tc\n\x9b日本") == "a[2Jb\tc\n日本"
