"""A conversation in the terminal: what was said, what is answered, and the commands in between."""

import json
from collections.abc import Callable, Generator
from pathlib import Path

from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.llm import LLM
from llmserve.outputs import RequestOutput
from llmserve.sampling_params import SamplingParams

HELP = """/help            this list
/reset           forget what was said; the system message stays
/system [TEXT]   set the system message and begin again, or show it
/save FILE       write the conversation as JSON
/exit            leave; so does Ctrl-D
Ctrl-C stops an answer. A message of several lines: end a line with a backslash, or put a line with
three quotes before it and one after."""


class ChatSession:
    """The messages so far, and the model that answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.last: RequestOutput | None = None  # of the last answer
        self.reset()

    def reset(self) -> None:
        """Begins again."""
        system = self._system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Generator[str, None, None]:
        """The answer to a message, piece by piece. What was answered until the caller stops, or is
        interrupted, is kept; a message that cannot be answered is not. Raises LLMServeError."""
        prompt = self._prompt([*self.messages, {"role": "user", "content": text}])
        stream = self._llm.stream(prompt, self._params)
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for self.last in stream:
                piece = self.last.outputs[0].text
                pieces.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        error = self.last.outputs[0].error if self.last else None
        if error is not None:
            del self.messages[-2:]
            raise LLMServeError(error)

    def command(self, line: str) -> str | None:
        """What a command line says, None for /exit. A bad one says what is wrong."""
        name, _, argument = line.partition(" ")
        run = self._commands().get(name)
        if name in ("/exit", "/quit"):
            return None
        if run is None:
            return f"no command {name}; /help lists them"
        try:
            return run(argument.strip())
        except (OSError, LLMServeError) as error:
            return f"{name}: {error}"

    def _commands(self) -> dict[str, Callable[[str], str]]:
        return {
            "/help": lambda _: HELP,
            "/reset": lambda _: self._begin_again(),
            "/system": self._set_system,
            "/save": self._save,
        }

    def _begin_again(self) -> str:
        self.reset()
        return "forgotten"

    def _set_system(self, text: str) -> str:
        if not text:
            return self._system or "there is no system message"
        system, self._system = self._system, text
        self.reset()
        try:
            self._prompt([*self.messages, {"role": "user", "content": "x"}])
        except InvalidArgument:  # the template takes none
            self._system = system
            self.reset()
            raise
        return "set; the conversation begins again"

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs the name of a file"
        path = Path(name).expanduser()
        path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2), encoding="utf-8")
        return f"{len(self.messages)} messages in {path}"

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self._llm.get_tokenizer()
        token_ids: list[int] = tokenizer.apply_chat_template(  # type: ignore[assignment]
            messages, add_generation_prompt=True
        )
        return token_ids
