"""What `build_app` takes, checked before anything is deployed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from llmserve.common.arguments import describe, text
from llmserve.errors import InvalidArgument
from llmserve.options.engine_options import read_options
from llmserve.route.settings import RouteSettings
from llmserve.server.settings import ServerSettings

_FRONT_ONLY = ("host", "port", "ssl_certfile", "ssl_keyfile", "max_connections", "drain_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """An application of one model. Raises InvalidArgument that names the field."""

    model: str  # as in LLM: a path that every node has, or a Hub id
    served_model_name: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)  # the other arguments of AsyncLLM
    server: Mapping[str, Any] = field(default_factory=dict)  # of ServerSettings, of each replica
    route: Mapping[str, Any] = field(default_factory=dict)  # of RouteSettings, of the front
    replicas: Mapping[str, Any] = field(default_factory=dict)  # of serve.deployment
    front: Mapping[str, Any] = field(default_factory=dict)  # likewise

    @classmethod
    def of(cls, config: object) -> "RayConfig":
        """Of a mapping, as it stands in YAML."""
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise InvalidArgument(f"config must be a mapping, got {describe(config)}")
        names = [item.name for item in fields(cls)]
        unknown = next((name for name in config if name not in names), None)
        if unknown is not None:
            raise InvalidArgument(f"config has no {unknown!r}; it has {', '.join(names)}")
        if "model" not in config:
            raise InvalidArgument("config lacks model: a path that every node has, or a Hub id")
        return cls(**config)

    def __post_init__(self) -> None:
        text("model", self.model)
        text("served_model_name", self.served_model_name)
        for name in ("engine", "server", "route", "replicas", "front"):
            if not isinstance(getattr(self, name), Mapping):
                raise InvalidArgument(
                    f"{name} must be a mapping, got {describe(getattr(self, name))}"
                )
        read_options("build_app", self.model, dict(self.engine))
        for name in _FRONT_ONLY:
            if name in self.route or name in self.server:
                raise InvalidArgument(
                    f"{name} is Ray Serve's to say: serve.start(http_options=...)"
                )
        _ = self.server_settings, self.route_settings

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def server_settings(self) -> ServerSettings:
        """Of each replica. Keys are the front's to ask for."""
        _check_names(ServerSettings, "server", self.server)
        return ServerSettings(**self.server)

    @property
    def route_settings(self) -> RouteSettings:
        """Of the front."""
        _check_names(RouteSettings, "route", self.route)
        return RouteSettings(**self.route)

    def replica_options(self) -> dict[str, Any]:
        """Of the deployment of replicas, with what it has where nothing is said."""
        given = dict(self.replicas)
        actor = {
            "num_cpus": self.engine.get("num_threads") or 1,
            **given.pop("ray_actor_options", {}),
        }
        if "autoscaling_config" not in given:
            given.setdefault("num_replicas", 2)
        return {
            "name": "LLMReplica",
            "max_ongoing_requests": 1024,  # the engine queues, by its own policy
            "health_check_period_s": 1.0,
            "health_check_timeout_s": 10.0,
            "graceful_shutdown_wait_loop_s": 0.5,
            "graceful_shutdown_timeout_s": 60.0,
            **given,
            "ray_actor_options": actor,
        }

    def front_options(self) -> dict[str, Any]:
        """Likewise, of the front."""
        given = dict(self.front)
        actor = {"num_cpus": 0.1, **given.pop("ray_actor_options", {})}
        if "autoscaling_config" not in given:
            given.setdefault("num_replicas", 1)
        return {
            "name": "Front",
            "max_ongoing_requests": 4096,
            "graceful_shutdown_wait_loop_s": 0.5,
            "graceful_shutdown_timeout_s": 60.0,
            **given,
            "ray_actor_options": actor,
        }


def _check_names(kind: Any, name: str, given: Mapping[str, Any]) -> None:
    known = [item.name for item in fields(kind)]
    unknown = next((key for key in given if key not in known), None)
    if unknown is not None:
        raise InvalidArgument(f"{name} has no {unknown!r}; it has {', '.join(known)}")


def spare(num_needed: float, share: float) -> int:
    """Replicas for so much load, with a share of them to spare."""
    return math.ceil(num_needed * (1 + share) - 1e-9)
