"""The settings of a server: one typed record, from which flags, YAML keys and docs are made."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from typing import Any

from llmserve.common.arguments import boolean, integer, number, text
from llmserve.errors import InvalidArgument
from llmserve.parsers.reasoning import NO_REASONING, REASONING_STYLES
from llmserve.parsers.registry import TOOL_STYLES, reasoning_style, tool_style
from llmserve.server.tiers import read_tiers

ROLES: Sequence[str] = ("both", "prefill", "decode")
UNIX = "unix:"  # begins an address that is a path

# What a server may do as others do where this one is stricter.
LENIENCIES = {
    "any_model_name": "a request for a model that is not here gets the first one",
    "unknown_fields": "fields of bodies that are not known are left out",
    "open_metrics": "/metrics asks for no key",
    "stream_usage": "streams tell their usage, asked for or not",
    "closed_schemas": "objects of every schema have no properties but their own, as under strict",
    "token_ids": "tokens are called token_id:7 and so on in log-probabilities, asked for or not",
}


def _setting(default: Any, help: str, is_list: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "is_list": is_list})


def _read_list(name: str, value: str) -> list[str]:
    """Texts with commas between, or a list of them in JSON, as vLLM takes it. Raises
    InvalidArgument."""
    items: object = value.split(",")
    if value.lstrip().startswith("["):
        try:
            items = json.loads(value)
        except ValueError:
            items = None
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise InvalidArgument(f"{name} must be a list of texts in JSON, got {value!r}")
    assert isinstance(items, list)
    return [item.strip() for item in items if item.strip()]


def check_values(settings: Any, can_be_zero: tuple[str, ...]) -> None:
    """Each value of a dataclass of settings is of its default's type; numbers are 0 or more, and
    integers 1 or more, but for those named and those whose default is 0. Raises InvalidArgument."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        if isinstance(item.default, bool):
            boolean(item.name, value)
        elif isinstance(item.default, str):
            text(item.name, value)
        elif isinstance(item.default, int):
            least = 0 if item.name in can_be_zero or item.default == 0 else 1
            integer(item.name, value, least)
        elif number(item.name, value) < 0:
            raise InvalidArgument(f"{item.name} must be at least 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server listens, whom it lets in, and what it bounds. Times are in seconds; 0 turns a
    time limit off. Raises InvalidArgument that names the setting."""

    host: str = _setting(
        "127.0.0.1",
        "address to listen on, or several with commas between; 0.0.0.0 for every interface, "
        "unix:PATH for a socket of the file system",
    )
    port: int = _setting(8000, "port to listen on; 0 takes a free one")
    api_key: str = _setting("", "key that clients must send; several with commas between", True)
    admin_key: str = _setting("", "key of the /debug routes, which are closed without one")
    ssl_certfile: str = _setting("", "PEM file of the certificate: serves HTTPS")
    ssl_keyfile: str = _setting("", "PEM file of its private key")
    allowed_origins: str = _setting(
        "", "origins of web pages that may call, with commas between; localhost is any port's", True
    )

    max_body_bytes: int = _setting(2**22, "longest request body (413)")
    max_connections: int = _setting(4096, "open connections; silent ones make room for more")
    read_timeout: float = _setting(30.0, "time that a client has to send a head, and a body (408)")
    max_num_samples: int = _setting(128, "most sequences that one request may ask for")
    max_output_tokens: int = _setting(
        0, "most new tokens a sequence; longer ones end there; 0: as many as the context holds"
    )

    max_waiting_requests: int = _setting(256, "more than can run at once may wait (429)")
    max_waiting_tokens: int = _setting(2**20, "prompt and new tokens that may wait (429)")

    key_requests_per_minute: int = _setting(0, "requests that a key may send a minute; 0: any")
    key_tokens_per_minute: int = _setting(0, "prompt and new tokens that a key may ask for")

    coalesce_window: float = _setting(
        0.0, "time that a request waits for others like it, to share one run; 0: none is shared"
    )

    request_timeout: float = _setting(0.0, "time of a request, as a whole; it may ask for less")
    queue_timeout: float = _setting(0.0, "time until a request first runs")
    first_token_timeout: float = _setting(0.0, "time until a request's first token")
    drain_timeout: float = _setting(30.0, "time that running requests have after SIGTERM")

    watchdog_timeout: float = _setting(60.0, "time that a step may hang before /health says so")
    error_spike: float = _setting(0.5, "share of failed requests at which new ones get 503")

    stream_flush_tokens: int = _setting(1, "tokens a line of a stream, after the first")
    stream_flush_interval: float = _setting(0.0, "most time that tokens of a group wait")
    stream_flush_newline: bool = _setting(False, "a line break in the text ends the group")
    stream_keep_alive: float = _setting(15.0, "time without news until a comment is sent")
    stream_buffer_tokens: int = _setting(100, "tokens that a slow client may lag behind")
    pace: str = _setting("", "tokens a second of streams by service_tier: free=8,plus=20")
    stream_grace: float = _setting(10.0, "time that a slow client has to catch up, then it is cut")

    leniency: str = _setting(
        "",
        f"what to do as other servers do, with commas between: {', '.join(LENIENCIES)}",
        is_list=True,
    )

    tool_call_parser: str = _setting(
        "auto", f"how calls look: {', '.join(style.name for style in TOOL_STYLES)}"
    )
    reasoning_parser: str = _setting(
        "auto",
        f"how reasoning looks: {', '.join(style.name for style in REASONING_STYLES)}; or none",
    )

    role: str = _setting(
        "both",
        "what a router sends here: prefill, prompts whose answers others give; decode, answers to "
        "prompts that others have computed; or both",
    )
    hand_over_key: str = _setting(
        "", "key of the servers that hand prompts over to each other; without one none does"
    )
    hand_over_address: str = _setting(
        "127.0.0.1:0", "IP address and port where others fetch computed prompts; 0 is a free port"
    )
    hand_over_timeout: float = _setting(
        5.0, "time in which a peer has to move on, or the prompt is computed here"
    )

    log_format: str = _setting("text", "text or json")
    trace: str = _setting("", "file for a Perfetto trace of the last steps, written at the end")
    otlp_traces_endpoint: str = _setting("", "OTLP/HTTP URL that gets OpenTelemetry spans")
    boost_off: bool = _setting(
        False, "while a GPU's clock swings, fewer sequences run at once, until it is steady"
    )
    vllm_metrics: bool = _setting(False, "also export metrics under vLLM's names")

    def __post_init__(self) -> None:
        check_values(self, can_be_zero=("port",))
        if self.port > 65535:
            raise InvalidArgument(f"port must be at most 65535, got {self.port}")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise InvalidArgument("ssl_certfile and ssl_keyfile belong together; give both")
        if not self.hosts:
            raise InvalidArgument("host is empty; give an address to listen on")
        if self.tool_call_parser != "auto":
            tool_style(self.tool_call_parser)
        if self.reasoning_parser not in ("auto", *NO_REASONING):
            reasoning_style(self.reasoning_parser)
        for name in _read_list("leniency", self.leniency):
            if name not in LENIENCIES:
                known = ", ".join(LENIENCIES)
                raise InvalidArgument(f"leniency must be some of {known}, got {name!r}")
        _read_list("allowed_origins", self.allowed_origins)
        read_tiers(self.pace)
        self._check_hand_over()
        if self.log_format not in ("text", "json"):
            raise InvalidArgument(f"log_format must be text or json, got {self.log_format!r}")

    def _check_hand_over(self) -> None:
        if self.role not in ROLES:
            raise InvalidArgument(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        if self.role != "both" and not self.hand_over_key:
            raise InvalidArgument(
                f"role {self.role} needs hand_over_key, the same one on all servers that hand over "
                f"to each other"
            )
        if self.hand_over_key and len(self.hand_over_key) < 16:
            raise InvalidArgument("hand_over_key needs at least 16 characters")
        if self.hand_over_timeout == 0:
            raise InvalidArgument("hand_over_timeout must be above 0")
        host, _, port = self.hand_over_address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and int(port[:6]) <= 65535
        try:
            address = ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            address = None
        if address is None or not is_port:
            raise InvalidArgument(
                f"hand_over_address must be an IP address and a port, 10.0.0.5:4711 or "
                f"[fd00::5]:4711, got {self.hand_over_address!r}"
            )
        if address.is_unspecified:
            raise InvalidArgument(
                f"hand_over_address {self.hand_over_address} says no address that others can go "
                f"to; give that of one interface"
            )

    @property
    def hosts(self) -> list[str]:
        """The addresses to listen on."""
        return _read_list("host", self.host)

    @property
    def api_keys(self) -> list[str]:
        """The keys of clients; none: everybody is let in."""
        return [key.strip() for key in self.api_key.split(",") if key.strip()]

    @property
    def origins(self) -> list[str]:
        """The origins that CORS allows."""
        return _read_list("allowed_origins", self.allowed_origins)

    def is_lenient(self, name: str) -> bool:
        """Whether the server does this as others do."""
        return name in _read_list("leniency", self.leniency)
