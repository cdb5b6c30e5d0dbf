"""The settings of a router: one typed record, from which flags are made."""

from dataclasses import dataclass, field, fields
from typing import Any

from llmserve import _core
from llmserve.errors import InvalidArgument
from llmserve.options.option import Option
from llmserve.server.settings import ServerSettings, check_values


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """How a router listens, and how it treats replicas. Times are in seconds. Raises
    InvalidArgument that names the setting."""

    host: str = _setting("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _setting(8000, "port to listen on; 0 takes a free one")
    api_key: str = _setting("", "key that clients must send; several with commas between")
    replica_key: str = _setting("", "key that replicas get; without one they get the client's")
    replica_admin_key: str = _setting("", "admin key of the replicas: they tell what they cache")
    ssl_certfile: str = _setting("", "PEM file of the certificate: serves HTTPS")
    ssl_keyfile: str = _setting("", "PEM file of its private key")
    max_body_bytes: int = _setting(2**22, "longest request body (413)")
    max_connections: int = _setting(4096, "open connections; silent ones make room for more")
    read_timeout: float = _setting(30.0, "time that a client has to send a head, and a body (408)")
    tokenizer: str = _setting(
        "", "the replicas' model folder or tokenizer file: prefixes go by tokens, not by text"
    )
    policy: str = _setting("prefix", "how a replica is chosen: prefix, power_of_two, round_robin")
    assumed_blocks: int = _setting(
        4096, "blocks of prompts that a replica is thought to keep where it does not tell"
    )
    connect_timeout: float = _setting(2.0, "time that a replica has to take a connection")
    health_interval: float = _setting(0.5, "time between looks at a replica")
    health_timeout: float = _setting(4.0, "time without a sign of life until it counts as dead")
    retries: int = _setting(3, "replicas that a request is sent to after the first has failed")
    replay: bool = _setting(True, "streams go on elsewhere when their replica dies")
    hand_over_min_tokens: int = _setting(
        256, "prompt tokens to compute from which servers of --role prefill do it"
    )
    drain_timeout: float = _setting(30.0, "time that running requests have after SIGTERM")
    log_format: str = _setting("text", "text or json")

    def __post_init__(self) -> None:
        check_values(self, can_be_zero=("port", "retries", "hand_over_min_tokens"))
        policies = [name for name, _ in _core.supported_router_policies()]
        if self.policy not in policies:
            raise InvalidArgument(
                f"policy must be one of {', '.join(policies)}, got {self.policy!r}"
            )
        _ = self.listening

    @property
    def listening(self) -> ServerSettings:
        """What a router has in common with a server: how it listens, and whom it lets in."""
        names = ("host", "port", "api_key", "ssl_certfile", "ssl_keyfile", "max_body_bytes")
        more = ("max_connections", "read_timeout", "drain_timeout", "log_format")
        return ServerSettings(**{name: getattr(self, name) for name in (*names, *more)})


OPTIONS = tuple(
    Option(name=item.name, kind=type(item.default), **item.metadata)
    for item in fields(RouteSettings)
)
SECRETS = {
    "api_key": "LLMSERVE_API_KEY",
    "replica_key": "LLMSERVE_REPLICA_KEY",
    "replica_admin_key": "LLMSERVE_ADMIN_KEY",
}
