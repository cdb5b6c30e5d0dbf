"""`llmserve chat`: a conversation with a model in the terminal, or by a pipe."""

import argparse
import shutil
import sys
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import Any

from llmserve.cli.chat_session import Again, ChatSession
from llmserve.cli.console import dim, has_colours, printable
from llmserve.cli.interrupts import Interrupts
from llmserve.cli.markdown import MarkdownWriter
from llmserve.cli.model_argument import add_model_argument, model_of
from llmserve.cli.options import (
    add_draft_option,
    add_engine_options,
    add_sampling_options,
    add_short_flags,
    draw_seed,
    figures,
    load_model,
    sampling_params,
)
from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.llm import LLM
from llmserve.requests.generation_config import own_max_tokens
from llmserve.sampling_params import SamplingParams

_EXAMPLES = """examples:
  llmserve chat
  llmserve chat Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
  echo "Tell me a story." | llmserve chat ./Llama-3.2-1B-Instruct --max-tokens 200
"""
_BLOCK = '"""'


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talks with a model by its chat template. In a terminal /help lists the "
        "commands; from a pipe every line is a message. Answers go to stdout, everything else to "
        "stderr.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--chat-template", metavar="FILE", help="in place of the model's own")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of an answer; default: the model's own"
    )
    add_sampling_options(parser)
    add_draft_option(parser)
    add_engine_options(parser)
    parser.add_argument("--quiet", action="store_true", help="no lines of figures")
    parser.add_argument(
        "--plain", action="store_true", help="answers as they are: no wrapping, no Markdown"
    )
    add_short_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    model = model_of(options)
    draw_seed(options)
    screen = _Screen(sys.stdin.isatty(), options.quiet, options.plain)
    with screen.loading(model):
        llm = load_model(options, model, chat_template=options.chat_template)

    def load(name: str) -> LLM:
        with screen.loading(name):
            return load_model(options, name, chat_template=options.chat_template)

    def params_of(llm: LLM) -> SamplingParams:
        defaults = llm.get_default_sampling_params()
        max_tokens = options.max_tokens or own_max_tokens(defaults)
        return sampling_params(options, defaults, max_tokens)

    session = ChatSession(llm, params_of, options.system, load)
    with closing(session):
        if not llm.get_tokenizer().chat_template_names:
            raise InvalidArgument(
                f"{model} has no chat template; use `llmserve generate`, or give one with "
                f"--chat-template FILE"
            )
        screen.say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        seed = session.params.seed
        screen.say(f"seed {seed}; --seed {seed} gives these answers again", to_pipes=True)
        with screen.interrupts or nullcontext():
            return _converse(session, screen)


def _converse(session: ChatSession, screen: "_Screen") -> int:
    """Until the end of the input; 1 if it came from a pipe and a message had no answer."""
    num_failed = 0
    while (line := screen.read()) is not None:
        if screen.is_terminal and line.startswith("/"):
            said = session.command(line)
            if said is None:
                break
            if isinstance(said, Again):
                _answer(session, said.message, screen)
            else:
                screen.say(said)
        elif line.strip():
            num_failed += not _answer(session, line, screen)
    return 1 if num_failed and not screen.is_terminal else 0


def _answer(session: ChatSession, line: str, screen: "_Screen") -> bool:
    try:
        screen.begin_answer()
        # An answer that is interrupted is aborted at once.
        with closing(session.answer(line)) as pieces, screen.interruptible():
            for piece in pieces:
                screen.write(piece)
    except KeyboardInterrupt:
        screen.end_answer()
        if not screen.is_terminal:
            raise
        screen.say("stopped")
        return True
    except LLMServeError as error:
        screen.end_answer()
        print(f"llmserve: {error}", file=sys.stderr)
        if screen.is_terminal:
            screen.say("/reset begins again")
        return False
    screen.end_answer()
    if session.last is not None and not screen.is_quiet:
        dim(sys.stderr, figures(session.last))
    return True


class _Screen:
    """Where a person reads and writes, or a pipe. rich draws it where it is installed."""

    def __init__(self, is_terminal: bool, is_quiet: bool, is_plain: bool) -> None:
        self.is_terminal = is_terminal
        self.is_quiet = is_quiet or not is_terminal
        self._leaves_out = is_quiet
        self._is_drawn = is_terminal and not is_plain
        self._writer: MarkdownWriter | None = None  # while an answer is written
        self.interrupts = Interrupts() if is_terminal else None
        self._rich = _rich_console() if is_terminal else None
        if is_terminal:
            _edit_lines()

    def loading(self, model: object) -> Any:
        """A context that shows that something goes on."""
        if self._rich is not None:
            return self._rich.status(f"loading {model}")
        return _Plain(f"loading {model}" if self.is_terminal else "")

    def say(self, text: str, to_pipes: bool = False) -> None:
        """A remark to the person. to_pipes: also where the messages come from a pipe, unless all
        remarks are left out."""
        if self.is_terminal or (to_pipes and not self._leaves_out):
            dim(sys.stderr, printable(text))

    def read(self) -> str | None:
        """The next message or command, None at the end."""
        while True:
            try:
                with self.interruptible():
                    return self._read_message()
            except EOFError:
                self.say("")
                return None
            except KeyboardInterrupt:
                if not self.is_terminal:
                    raise
                self.say("\nCtrl-D or /exit leaves")

    def interruptible(self) -> AbstractContextManager[None]:
        """Where a person's Ctrl-C ends what is done, and not the program."""
        return self.interrupts.taken() if self.interrupts is not None else nullcontext()

    def begin_answer(self) -> None:
        """Before the first piece."""
        if self._rich is not None:
            self._rich.print("\u25cf ", end="", style="cyan")
        if self._is_drawn and sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
            column = 0 if self._rich is None else 2
            self._writer = MarkdownWriter(width, has_colours(sys.stdout), column)

    def write(self, piece: str) -> None:
        """A piece of the answer."""
        if sys.stdout.isatty():
            piece = printable(piece)
            piece = piece if self._writer is None else self._writer.feed(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()

    def end_answer(self) -> None:
        """After the last piece."""
        rest = "" if self._writer is None else self._writer.end()
        self._writer = None
        print(rest, flush=True)

    def _read_message(self) -> str:
        line = self._read_line(">>> ")
        if not self.is_terminal:
            return line
        if line.strip() == _BLOCK:
            return self._read_block()
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._read_line("... ")
        return line

    def _read_block(self) -> str:
        lines = []
        while (line := self._read_line("... ")).strip() != _BLOCK:
            lines.append(line)
        return "\n".join(lines)

    def _read_line(self, prompt: str) -> str:
        if self.is_terminal:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


class _Plain:
    """`rich`'s status without it: a line."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        if self._text:
            dim(sys.stderr, self._text)

    def __exit__(self, *_: object) -> None:
        pass


def _rich_console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False)


def _edit_lines() -> None:
    """Arrow keys and history, where Python was built with readline."""
    with suppress(ImportError):
        import readline  # noqa: F401
