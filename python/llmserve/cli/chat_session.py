"""A conversation in the terminal: what was said, what is answered, and the commands in between."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from llmserve.checkpoint.model_files import MAX_CONFIG_BYTES
from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.llm import LLM
from llmserve.outputs import RequestOutput
from llmserve.sampling_params import SAMPLING_FIELDS, SamplingParams

HELP = """/help            this list
/reset           forget what was said; the system message stays
/system [TEXT]   set the system message and begin again, or show it
/set [NAME [X]]  set a sampling parameter (temperature, top_p, seed, max_tokens, ...), or show them
/regenerate      answer the last message again, with another seed
/model NAME      go on with another model
/save FILE       write the conversation as JSON
/load FILE       go on with one that was saved
/exit            leave; so does Ctrl-D
Ctrl-C stops an answer. A message of several lines: end a line with a backslash, or put a line with
three quotes before it and one after."""

# What /set sets, and how it reads it.
_SETTINGS: dict[str, Callable[[str], Any]] = {
    name: known.body
    for name, known in SAMPLING_FIELDS.items()
    if known.body in (int, float) and known.option
}
_SETTINGS |= {"max_tokens": int, "stop": lambda text: [text]}
_ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """A command's outcome: a message that is to be answered."""

    message: str


class ChatSession:
    """The messages so far, and the model that answers them, which is the session's to close."""

    def __init__(
        self,
        llm: LLM,
        params_of: Callable[[LLM], SamplingParams],
        system: str | None,
        load: Callable[[str], LLM],
    ) -> None:
        self._llm = llm
        self._params_of = params_of  # the parameters with which a model begins
        self.params = params_of(llm)
        self._set: dict[str, Any] = {}  # by /set
        self._load_model = load
        self._system = system
        self.messages: list[dict[str, str]] = []
        self.last: RequestOutput | None = None  # of the last answer
        self.reset()

    def close(self) -> None:
        """Gives the model's memory back."""
        self._llm.close()

    def reset(self) -> None:
        """Begins again."""
        system = self._system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Generator[str, None, None]:
        """The answer to a message, piece by piece. What was answered until the caller stops, or is
        interrupted, is kept; a message that cannot be answered is not. Raises LLMServeError."""
        prompt = self._prompt([*self.messages, {"role": "user", "content": text}])
        stream = self._llm.stream(prompt, self.params)
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

    def command(self, line: str) -> str | Again | None:
        """What a command line says or asks for, None for /exit. A bad one says what is wrong."""
        name, _, argument = line.partition(" ")
        commands = self._commands()
        if name in ("/exit", "/quit", "/bye"):
            return None
        if name not in commands:
            near = difflib.get_close_matches(name, commands, n=1)
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            return f"no command {name}; {hint}"
        try:
            return commands[name](argument.strip())
        except (OSError, LLMServeError) as error:
            return f"{name}: {error}"

    def _commands(self) -> dict[str, Callable[[str], str | Again]]:
        return {
            "/help": lambda _: HELP,
            "/reset": lambda _: self._begin_again(),
            "/system": self._set_system,
            "/set": self._set_parameter,
            "/regenerate": lambda _: self._regenerate(),
            "/model": self._change_model,
            "/save": self._save,
            "/load": self._load,
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

    def _set_parameter(self, text: str) -> str:
        if not text:
            return "\n".join(f"{name:<20} {getattr(self.params, name)}" for name in _SETTINGS)
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        begun = [known for known in _SETTINGS if known.startswith(name)]
        if len(begun) == 1:  # "temp"
            name = begun[0]
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, _SETTINGS, n=1)
            hint = f"did you mean {near[0]}?" if near else "/set alone lists what there is"
            return f"there is no {name}; {hint}"
        if not value:
            return f"{name} is {getattr(self.params, name)}"
        try:
            parsed = None if value.lower() == "none" else _SETTINGS[name](value.strip())
        except ValueError:
            return f"{name} is a number, got {value!r}"
        if parsed is None and name not in ("seed", "max_tokens", "stop"):
            parsed = getattr(SamplingParams(), name)
        given: dict[str, Any] = {name: parsed}
        params = dataclasses.replace(self.params, **given)
        params.checked()
        self.params = params
        self._set[name] = parsed
        return f"{name} is {getattr(params, name)}"

    def _regenerate(self) -> str | Again:
        """Takes the last answer and its message back, to be answered with the next seed."""
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            return "there is no answer yet"
        if self.messages[-2]["role"] != "user":
            return "the last answer is to no message of yours"
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        if self.params.seed is not None:
            self.params = dataclasses.replace(self.params, seed=(self.params.seed + 1) % 2**63)
        return Again(text)

    def _change_model(self, name: str) -> str:
        """The old model answers on where the new one cannot."""
        if not name:
            return "/model needs a directory, a .gguf file or a Hub id"
        llm = self._load_model(name)
        try:
            if not llm.get_tokenizer().chat_template_names:
                raise InvalidArgument(f"{name} has no chat template")
            params = dataclasses.replace(self._params_of(llm), **self._set)
        except BaseException:
            llm.close()
            raise
        old, self._llm, self.params = self._llm, llm, params
        old.close()
        return f"{name} answers from here on"

    def _save(self, name: str) -> str:
        if not name:
            return "/save needs the name of a file"
        path = Path(name).expanduser()
        path.write_text(json.dumps(self.messages, ensure_ascii=False, indent=2), encoding="utf-8")
        return f"{len(self.messages)} messages in {path}"

    def _load(self, name: str) -> str:
        if not name:
            return "/load needs the name of a file"
        path = Path(name).expanduser()
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidArgument(f"{path} is too large for a conversation")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path} is no JSON: {error}") from error
        messages = _messages(found, path)
        self._prompt([*messages, {"role": "user", "content": "x"}])  # the template takes them
        self.messages = messages
        is_first = bool(messages) and messages[0]["role"] == "system"
        self._system = messages[0]["content"] if is_first else None
        return f"{len(messages)} messages from {path}"

    def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer = self._llm.get_tokenizer()
        token_ids: list[int] = tokenizer.apply_chat_template(  # type: ignore[assignment]
            messages, add_generation_prompt=True
        )
        return token_ids


def _messages(found: object, path: Path) -> list[dict[str, str]]:
    """What /save wrote. Raises InvalidArgument for anything else."""
    messages = found if isinstance(found, list) else None
    for message in messages or []:
        is_message = isinstance(message, dict) and set(message) == {"role", "content"}
        if not is_message or message["role"] not in _ROLES or type(message["content"]) is not str:
            messages = None
            break
    if messages is None:
        raise InvalidArgument(
            f'{path} is no conversation: expected a list of {{"role": ..., "content": ...}}'
        )
    return messages
