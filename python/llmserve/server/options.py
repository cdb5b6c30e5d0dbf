"""Where settings come from: flags, then the environment (keys only), then a file, then defaults."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.common.arguments import describe
from llmserve.common.units import parse_size, size
from llmserve.common.vllm_arguments import check_names
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.options.engine_options import ENGINE_OPTIONS as ALL_ENGINE_OPTIONS
from llmserve.options.engine_options import options_of
from llmserve.options.option import Option
from llmserve.options.peer_flags import joined, peer_flags
from llmserve.options.peer_replicas import NAMES as REPLICAS
from llmserve.options.peer_replicas import with_own_replicas
from llmserve.options.peer_speculation import combined
from llmserve.server.settings import ServerSettings

_MAX_FILE_BYTES = 2**20
_SECRET = ("api_key", "admin_key", "hand_over_key", "cluster_key")
_ENVIRONMENT = {
    "api_key": "LLMSERVE_API_KEY",
    "admin_key": "LLMSERVE_ADMIN_KEY",
    "hand_over_key": "LLMSERVE_HAND_OVER_KEY",
}

# Arguments of LLM; without a value they are LLM's defaults.
ENGINE_OPTIONS = options_of("serve")
SERVER_OPTIONS = tuple(
    Option(name=item.name, kind=type(item.default), **item.metadata)
    for item in dataclasses.fields(ServerSettings)
)
_LISTS = tuple(option.name for option in SERVER_OPTIONS if option.is_list)
SETTINGS = (
    *("model", "served_model_name"),
    *(option.name for option in (*ENGINE_OPTIONS, *SERVER_OPTIONS)),
)
# What is taken besides: options of the engine that have no flag of their own in the help.
_MORE_OPTIONS = tuple(
    option
    for option in ALL_ENGINE_OPTIONS
    if option not in ENGINE_OPTIONS and option.name not in peer_flags()
)
TAKEN = (*SETTINGS, *(option.name for option in _MORE_OPTIONS))


@dataclass(frozen=True, slots=True)
class Effective:
    """Every setting, and where it comes from."""

    engine: Mapping[str, Any]  # those that are given
    server: ServerSettings
    models: list[str]
    served_model_names: list[str]
    origins: Mapping[str, str]  # by setting: "flag", "environment", "file"; else the default

    def changed(self) -> str:
        """What is not at its default, in a line. Keys are not shown."""
        return ", ".join(line for line in self.lines() if not line.endswith("(default)"))

    def lines(self) -> list[str]:
        """A line a setting: name, value, origin. Keys are not shown."""
        names = {"model": self.models, "served_model_name": self.served_model_names}
        engine = {**engine_defaults(), **self.engine}
        values = {**names, **engine, **dataclasses.asdict(self.server)}
        return [
            f"{name}={'(set)' if name in _SECRET and value else value!r} "
            f"({self.origins.get(name, 'default')})"
            for name, value in values.items()
        ]


def engine_defaults() -> dict[str, Any]:
    """What AsyncLLM takes for each of ENGINE_OPTIONS that is not given; a seed is drawn."""
    from llmserve.async_llm import AsyncLLM  # needed here alone

    defaults = {option.name: option.default for option in ENGINE_OPTIONS}
    return {**defaults, "max_stall_ms": AsyncLLM._default_max_stall_ms, "seed": None}


def resolve(flags: Mapping[str, Any], path: str | None) -> Effective:
    """flags: those that were given, by name. Raises InvalidArgument that names the setting."""
    file = {} if path is None else _read(path)
    environment = {
        name: os.environ[variable]
        for name, variable in _ENVIRONMENT.items()
        if os.environ.get(variable)
    }
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, given in (("file", file), ("environment", environment), ("flag", flags)):
        for name, value in given.items():
            values[name], origins[name] = value, origin
    values = with_own_replicas(values)
    origins = {name: origins.get(name, "flag") for name in values}
    if isinstance(drafting := values.get("speculative_config"), Mapping):
        served = _names("model", values.get("model"))
        values["speculative_config"] = combined(drafting, served)
    server_names = {option.name for option in SERVER_OPTIONS}
    engine_names = {option.name for option in ALL_ENGINE_OPTIONS}
    return Effective(
        {name: value for name, value in values.items() if name in engine_names},
        ServerSettings(**{name: values[name] for name in values if name in server_names}),
        _names("model", values.get("model")),
        _names("served_model_name", values.get("served_model_name")),
        origins,
    )


def _names(name: str, value: object) -> list[str]:
    if value is None:
        return []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(item, str) and item for item in names):
        raise InvalidArgument(f"{name} must be a text or a list of texts, got {describe(value)}")
    return names


def _read(path: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise NotSupported("--config needs yaml; pip install 'llmserve[serve]'") from error
    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file.read(_MAX_FILE_BYTES))
    except OSError as error:
        raise InvalidArgument(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--config: {path} is not YAML: {error}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InvalidArgument(
            f"--config: {path} must be a mapping of settings, got {describe(document)}"
        )
    settings = {str(name).replace("-", "_"): value for name, value in document.items()}
    settings = _by_our_names(f"--config {path}", settings)
    kinds = {option.name: option.kind for option in (*ALL_ENGINE_OPTIONS, *SERVER_OPTIONS)}
    for name, value in settings.items():
        # In YAML `5` is an integer where a time may be given.
        if kinds.get(name) is float and type(value) is int:
            settings[name] = float(value)
        elif kinds.get(name) is size and isinstance(value, str):
            settings[name] = parse_size(name, value)
    return settings


def _by_our_names(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that have other servers' names by ours. Raises InvalidArgument for what is none, and
    NotSupported for what is not here."""
    rows = peer_flags()
    ours = {name: value for name, value in given.items() if name in TAKEN or name in REPLICAS}
    for name, value in given.items():
        if name not in TAKEN and name in rows:
            for setting, found in rows[name].settings(value).items():
                is_list = setting in _LISTS
                ours[setting] = joined(found, ours[setting], is_list) if setting in ours else found
    check_names(what, {k: v for k, v in given.items() if k not in ours and k not in rows}, SETTINGS)
    return ours
