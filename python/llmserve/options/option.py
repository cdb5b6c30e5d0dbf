"""A row of a table of options, from which flags, keys of files, checks and docs are made."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

from llmserve.common.arguments import INT32_MAX, INT64_MAX, boolean, integer, number, text
from llmserve.common.units import json_object, size, token_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Option:
    """An option by its name."""

    name: str
    kind: Callable[[str], Any]  # bool, int, float or str; or `size`, of bytes
    help: str  # a line
    alias: str = ""  # another flag
    is_list: bool = False  # texts with commas between: a flag that comes again adds to them

    @property
    def flags(self) -> list[str]:
        """`--max-model-len`, and the alias if there is one."""
        return ["--" + self.name.replace("_", "-"), *([self.alias] if self.alias else [])]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class EngineOption(Option):
    """A row of the table."""

    default: object
    acts_on: str  # a section of the page
    commands: str = ""  # those that have its flag: "run" (generate, chat, eval), serve, plan …
    minimum: int = 0  # of an integer
    maximum: int = INT32_MAX
    core: str | None = ""  # its name in the core where that is another; None: Python's alone
    convert: Callable[[str, object], object] | None = None  # into what the core takes
    more: str = ""  # for the page: what its help leaves out
    is_text: bool = True  # a flag can say it

    def checked(self, value: object) -> object:
        """`value` as the core takes it. Raises InvalidArgument that names the option."""
        if self.convert is not None:
            return self.convert(self.name, value)
        if self.kind in (int, size):
            return integer(self.name, value, self.minimum, self.maximum)
        if self.kind is bool:
            return boolean(self.name, value)
        return number(self.name, value) if self.kind is float else text(self.name, value)

    @property
    def description(self) -> str:
        """All that there is to say of it: its help, what that leaves out, and its bounds."""
        bounds = ""
        if self.kind in (int, size) and self.convert is None:
            bounds = f"{self.minimum} to {self.maximum}"
            if self.maximum in (INT32_MAX, INT64_MAX):
                bounds = f"At least {self.minimum}"
        return ". ".join(part for part in (self.help, self.more, bounds) if part)


def engine_option(default: object, acts_on: str, help: str, **details: Any) -> Any:
    """A field of the table; `details` are the rest of EngineOption."""
    details = {"default": default, "acts_on": acts_on, "help": help, **details}
    return field(default=default, metadata=details)


def not_here(default: object) -> Any:
    """An argument of vLLM's: vllm_arguments.py says what it may be, and why nothing else."""
    return field(default=default)


# Those that are an object of JSON on a command line.
_OBJECTS = (
    "hf_overrides",
    "default_chat_template_kwargs",
    "override_generation_config",
    "pooler_config",
    "speculative_config",
)


def kind_of(name: str, hint: object) -> Callable[[str], Any]:
    """How a text becomes a value of that type; names say what is in bytes."""
    hints = get_args(hint) or (hint,)
    kind = next((kind for kind in (bool, int, float) if kind in hints), str)
    if name == "max_model_len":
        return token_count
    if name in _OBJECTS:
        return json_object
    return size if kind is int and name.endswith("_bytes") else kind
