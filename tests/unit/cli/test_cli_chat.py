"""`llmserve chat`: in a terminal (a pty) and by a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from llmserve import LLM, InvalidArgument, SamplingParams, cli, demo_model_path
from llmserve.cli.chat_session import Again, ChatSession

# Starts of Python and a few tokens take a second or two.
DEADLINE_S = 120.0
NO_RICH = "import sys; sys.modules['rich.console'] = None; from llmserve.cli import main; "
# Answers that only max_tokens ends: the model's own ends come within a second or so.
ENDLESS = """
import sys
from llmserve.cli import chat, main
params = chat.sampling_params
chat.sampling_params = lambda *given: params(*given).clone(ignore_eos=True)
"""


class Terminal:
    """The command in a pseudo-terminal, typed into and read like a person does."""

    def __init__(self, command: list[str]) -> None:
        import pty

        main, side = pty.openpty()
        self._fd = main
        self._seen = ""
        self._process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1"},
        )
        os.close(side)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self, text: str) -> None:
        """Presses Ctrl-C, once, and waits for `text`. Python sees one that comes between the prompt
        and the wait for a line only after that line: Enter ends it, and elsewhere is an empty one.
        """
        end = time.monotonic() + DEADLINE_S
        self._process.send_signal(signal.SIGINT)
        while text not in self._seen:
            assert time.monotonic() < end, f"{text!r} did not come; shown: {self._seen!r}"
            if not select.select([self._fd], [], [], 1.0)[0]:
                self.type("\n")
            assert self._read(), f"it ended; shown: {self._seen!r}"
        self.wait_for(text)

    def leave(self) -> None:
        """Presses Ctrl-D at the prompt, before which the terminal would take it for itself; again
        at another, if an empty line brought one."""
        end = time.monotonic() + DEADLINE_S
        while self._process.poll() is None:
            assert time.monotonic() < end, f"it did not end; shown: {self._seen!r}"
            if ">>> " in self._seen:
                self._seen = self._seen.partition(">>> ")[2]
                self.type("\x04")
            self._read()

    def wait_for(self, text: str) -> str:
        """What is shown up to `text`, from where the last wait ended."""
        end = time.monotonic() + DEADLINE_S
        while text not in self._seen:
            if time.monotonic() > end or not self._read():
                raise AssertionError(f"{text!r} did not come; shown: {self._seen!r}")
        before, _, self._seen = self._seen.partition(text)
        return before

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 1.0)[0]:
            return self._process.poll() is None
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other side is closed
            return False
        self._seen += data.decode("utf-8", "replace")
        return True

    def end(self) -> int:
        end = time.monotonic() + DEADLINE_S
        while self._process.poll() is None and self._read():
            assert time.monotonic() < end, f"it did not end; shown: {self._seen!r}"
        return self._process.wait(DEADLINE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)


@contextmanager
def terminal(*arguments: str, code: str | None = None) -> Iterator[Terminal]:
    start = ["-c", f"{code}sys.exit(main())"] if code else ["-m", "llmserve"]
    process = Terminal([sys.executable, *start, "chat", "--num-threads", "1", *arguments])
    try:
        yield process
    finally:
        process.close()


def piped(
    *arguments: str, stdin: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    exit_code = cli.main(["chat", *arguments])
    captured = capsys.readouterr()
    return exit_code, captured.out, captured.err


@pytest.mark.parametrize("code", [None, NO_RICH], ids=["rich", "plain"])
def test_a_conversation_in_a_terminal(code: str | None, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with terminal("--temperature", "0", "--max-tokens", "8", code=code) as person:
        person.wait_for("/help lists the commands")
        person.wait_for(">>> ")
        person.type("Tell me a story.\n")
        person.wait_for("8 new tokens")
        person.wait_for(">>> ")
        person.type("And \\\n")
        person.wait_for("... ")
        person.type("then?\n")
        person.wait_for("8 new tokens")
        person.wait_for(">>> ")
        person.type('"""\n')
        person.wait_for("... ")
        person.type("one\n")
        person.wait_for("... ")
        person.type('two\n"""\n')
        person.wait_for("8 new tokens")
        person.type(f"/save {saved}\n")
        person.wait_for("6 messages in")
        person.type("/nothing\n")
        person.wait_for("no command /nothing; /help lists them")
        person.type("/help\n")
        person.wait_for("forget what was said")
        person.type("/exit\n")
        assert person.end() == 0
    messages = json.loads(saved.read_text(encoding="utf-8"))
    assert [m["role"] for m in messages] == ["user", "assistant"] * 3
    assert [m["content"] for m in messages[::2]] == ["Tell me a story.", "And \nthen?", "one\ntwo"]
    assert all(m["content"] for m in messages[1::2])


def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with terminal("--device", "ref", "--max-tokens", "1500", code=ENDLESS) as person:
        person.wait_for(">>> ")
        person.interrupt("Ctrl-D or /exit leaves")
        person.wait_for(">>> ")
        person.type("Tell me a story.\n")
        person.wait_for("\u25cf ")
        assert person.wait_for(" ")  # a word; the reference takes seconds for the others
        person.interrupt("stopped")
        person.wait_for(">>> ")
        person.type("/reset\n")
        person.wait_for("forgotten")
        person.leave()
        assert person.end() == 0


def test_lines_of_a_pipe_are_messages_of_one_conversation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_code, out, err = piped(
        "--temperature",
        "0",
        "--max-tokens",
        "6",
        stdin="Hello.\n\nWho are you?\n",
        capsys=capsys,
        monkeypatch=monkeypatch,
    )
    messages = [{"role": "user", "content": "Hello."}]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    texts = []
    with LLM(demo_model_path()) as llm:
        for text in ("Hello.", "Who are you?"):
            messages = [*messages, {"role": "user", "content": text}] if texts else messages
            (output,) = llm.chat(messages, params, use_tqdm=False)
            texts.append(output.outputs[0].text)
            messages = [*messages, {"role": "assistant", "content": texts[-1]}]
    assert (exit_code, out) == (0, "".join(text + "\n" for text in texts))
    assert re.fullmatch(r"seed (\d+); --seed \1 gives these answers again\n", err)


def test_a_conversation_that_grows_too_long_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_code, out, err = piped(
        "--max-model-len",
        "24",
        stdin="word " * 100 + "\nHi\n",
        capsys=capsys,
        monkeypatch=monkeypatch,
    )
    assert exit_code == 1
    seed, error = err.splitlines()
    assert seed.startswith("seed ")
    assert "max_model_len=24" in error
    assert out.splitlines()[1].strip()  # the next one is answered


def test_a_model_without_a_chat_template_is_refused(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import checkpoints

    folder = checkpoints.copy_checkpoint(checkpoint, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text("{}")
    assert cli.main(["chat", str(folder)]) == 2
    assert "no chat template; use `llmserve generate`, or give one" in capsys.readouterr().err


@pytest.fixture
def session(llm: LLM) -> ChatSession:
    return session_of(llm)


def session_of(llm: LLM) -> ChatSession:
    """A session whose /model loads the demo, and nothing else."""

    def load(name: str) -> LLM:
        if name != "demo":
            raise InvalidArgument(f"there is nothing at {name!r}")
        return LLM(demo_model_path(), max_model_len=256)

    def params_of(llm: LLM) -> SamplingParams:
        return SamplingParams(max_tokens=4, seed=5)

    return ChatSession(llm, params_of, "Be kind.", load)


def test_set_changes_what_the_next_answer_is_drawn_with(session: ChatSession) -> None:
    assert session.command("/set temperature 0") == "temperature is 0.0"
    assert session.command("/set max-tokens 2") == "max_tokens is 2"
    assert session.command("/set temp") == "temperature is 0.0"
    assert (session.params.temperature, session.params.max_tokens) == (0.0, 2)
    list(session.answer("hello"))
    assert session.last is not None
    assert len(session.last.outputs[0].token_ids) <= 2
    assert session.command("/set max_tokens none") == "max_tokens is None"
    assert "temperature          0.0" in str(session.command("/set"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temprature 1", "there is no temprature; did you mean temperature?"),
        ("/set temperature hot", "temperature is a number, got 'hot'"),
        ("/set temperature -1", "/set: temperature must be finite and at least 0, got -1"),
        ("/set top_p", "top_p is 1.0"),
        ("/regenerat", "no command /regenerat; did you mean /regenerate?"),
        ("/dance", "no command /dance; "),
        ("/regenerate", "there is no answer yet"),
        ("/model", "/model needs a directory"),
        ("/model nowhere", "/model: there is nothing at 'nowhere'"),
        ("/load", "/load needs the name of a file"),
        ("/load /nowhere", "/load: [Errno 2] No such file"),
    ],
)
def test_a_bad_command_says_what_is_wrong_and_changes_nothing(
    session: ChatSession, line: str, message: str
) -> None:
    before = session.params
    assert str(session.command(line)).startswith(message)
    assert session.params == before
    assert session.messages == [{"role": "system", "content": "Be kind."}]


def test_regenerate_asks_again_with_another_seed(session: ChatSession) -> None:
    list(session.answer("hello"))
    assert session.command("/regenerate") == Again("hello")
    assert session.messages == [{"role": "system", "content": "Be kind."}]
    assert session.params.seed == 6


def test_a_conversation_is_saved_and_loaded(session: ChatSession, tmp_path: Path) -> None:
    list(session.answer("hello"))
    said = list(session.messages)
    path = tmp_path / "talk.json"
    assert session.command(f"/save {path}") == f"3 messages in {path}"
    session.command("/system Be brief.")
    assert session.command(f"/load {path}") == f"3 messages from {path}"
    assert session.messages == said
    assert session.command("/system") == "Be kind."
    for text in ("[1]", '{"role": "user"}', '[{"role": "pope", "content": "x"}]', "[", '"x"'):
        path.write_text(text)
        assert str(session.command(f"/load {path}")).startswith(f"/load: {path} is no ")
        assert session.messages == said


def test_another_model_goes_on_with_the_conversation(checkpoint: Path) -> None:
    old = LLM(checkpoint, num_gpu_blocks_override=32)
    with contextlib.closing(session_of(old)) as session:
        session.command("/set temperature 0")
        list(session.answer("hello"))
        assert session.command("/model demo") == "demo answers from here on"
        with pytest.raises(InvalidArgument, match="this LLM is closed"):
            old.generate("a", use_tqdm=False)
        assert session.params.temperature == 0.0
        list(session.answer("And then?"))
        assert len(session.messages) == 5


def test_a_message_that_cannot_be_answered_is_not_kept(session: ChatSession) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        list(session.answer("x" * 10_000))
    assert session.messages == [{"role": "system", "content": "Be kind."}]


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(session: ChatSession) -> None:
    pieces = session.answer("hello")
    first = next(pieces)
    pieces.close()
    assert session.messages[1:] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
    ]


def test_the_system_message_stays_when_the_conversation_begins_again(session: ChatSession) -> None:
    list(session.answer("hello"))
    assert session.command("/reset") == "forgotten"
    assert session.messages == [{"role": "system", "content": "Be kind."}]
    assert session.command("/system") == "Be kind."
    assert session.command("/system Be brief.") == "set; the conversation begins again"
    assert session.messages == [{"role": "system", "content": "Be brief."}]


SAVES: list[tuple[str, Callable[[str], bool]]] = [
    ("/save", lambda said: "needs the name of a file" in said),
    ("/save /nowhere/at/all", lambda said: said.startswith("/save: ") and "No such file" in said),
]


@pytest.mark.parametrize(("line", "is_right"), SAVES)
def test_a_conversation_that_cannot_be_saved_says_why(
    session: ChatSession, line: str, is_right: Callable[[str], bool]
) -> None:
    said = session.command(line)
    assert said is not None
    assert is_right(said)


def test_one_model_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "a", "--model", "b"]) == 2
    assert "MODEL is given twice, as 'a' and as 'b'" in capsys.readouterr().err
