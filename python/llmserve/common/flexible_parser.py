"""A parser of command lines that takes what vLLM's takes."""

import argparse
import json
import re
from collections.abc import Container, Sequence
from typing import Any

from llmserve.errors import InvalidArgument, NotSupported

_MAX_FILE_BYTES = 2**20
_DOTTED = re.compile(r"--([A-Za-z][\w-]*)\.([\w.-]+?)(\+)?(?:=(.*))?", re.DOTALL)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """As argparse's; besides, names of options are the same with hyphens and underscores,
    `--config file.yaml` gives options by name, which others on the line go before, and
    `--name.key value` sets a key of an option that is JSON.

    >>> parser = FlexibleArgumentParser()
    >>> _ = parser.add_argument("--max-model-len", type=int)
    >>> _ = parser.add_argument("--hf-overrides", type=json.loads)
    >>> parser.parse_args(["--max_model_len=8", "--hf-overrides.rope.factor", "2"])
    Namespace(max_model_len=8, hf_overrides={'rope': {'factor': 2}})
    """

    def add_argument(self, *names: Any, **details: Any) -> argparse.Action:
        """As argparse's; `deprecated`, which older versions of Python have not, changes nothing."""
        details.pop("deprecated", None)
        return super().add_argument(*names, **details)

    def parse_known_args(  # type: ignore[override]  # argparse overloads it
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's."""
        import sys

        words = list(sys.argv[1:] if args is None else args)
        words = [spelled(word, self._option_string_actions) for word in words]
        if "--config" not in self._option_string_actions:
            words = self._with_config(words)
        return super().parse_known_args(with_dotted(words), namespace)

    def _with_config(self, words: list[str]) -> list[str]:
        """The options of a file in the place of its name, before those of the line."""
        for idx, word in enumerate(words):
            if word == "--config" and idx + 1 < len(words):
                return [*self._of_file(words[idx + 1]), *words[:idx], *words[idx + 2 :]]
            if word.startswith("--config="):
                path = word.partition("=")[2]
                return [*self._of_file(path), *words[:idx], *words[idx + 1 :]]
        return words

    def _of_file(self, path: str) -> list[str]:
        words = []
        for name, value in _read_yaml(path).items():
            flag = spelled(f"--{name}", self._option_string_actions)
            if value is True or value is False:
                action = self._option_string_actions.get(flag)
                if isinstance(action, argparse.BooleanOptionalAction):
                    words.append(flag if value else "--no-" + flag[2:])
                elif value:
                    words.append(flag)
            elif isinstance(value, list):
                words += [flag, *map(str, value)]
            elif value is not None:
                words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        return words


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise NotSupported("--config needs yaml; pip install pyyaml") from error
    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file.read(_MAX_FILE_BYTES))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(f"--config: {path} cannot be read: {error}") from None
    if document is not None and not isinstance(document, dict):
        raise InvalidArgument(f"--config: {path} must be a mapping of options")
    return {str(name): value for name, value in (document or {}).items()}


def spelled(word: str, flags: Container[str]) -> str:
    """With hyphens, or underscores, where there is a flag so."""
    flag, equals, value = word.partition("=")
    if not flag.startswith("--") or flag in flags:
        return word
    name, dot, keys = flag.partition(".")
    for known in (name.replace("_", "-"), "--" + name[2:].replace("-", "_")):
        if known in flags:
            return known + dot + keys + equals + value
    return word


def with_dotted(words: list[str]) -> list[str]:
    """`--name.a.b value` as `--name '{"a": {"b": value}}'`, all keys of an option together."""
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        match = _DOTTED.fullmatch(word)
        if match is None:
            kept.append(word)
            continue
        name, keys, appends, value = match.groups()
        if value is None:
            value = next(rest, "true")
        *path, last = keys.split(".")
        target = objects.setdefault("--" + name, {})
        for key in path:
            target = target.setdefault(key, {})
        if appends:
            target.setdefault(last, []).append(_value(value))
        else:
            target[last] = _value(value)
    for flag, value in objects.items():
        kept += [flag, json.dumps(value)]
    return kept


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
