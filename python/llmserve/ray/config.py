"""What `build_app` takes, checked before anything is deployed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llmserve.common.arguments import describe, integer, text
from llmserve.errors import InvalidArgument, LLMServeError
from llmserve.options.engine_options import read_options
from llmserve.route.settings import RouteSettings
from llmserve.server.settings import ServerSettings

_NUM_REPLICAS = 2
_FIX_MEMORY = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
_BYTES_OF_PYTHON = 300 * 2**20  # its modules, Ray's worker and what requests take
_BY_ROLE = ("role", "hand_over_address")
_BY_PLACE = ("node_rank", "master_addr", "master_port")
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
    # Likewise, of replicas that compute prompts for the others; None: each computes its own
    prefill: Mapping[str, Any] | None = None
    standby_replicas: int = 0  # beside num_replicas: started, and without requests while these live

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
        integer("standby_replicas", self.standby_replicas, 0, 1024)
        for name in ("engine", "server", "route", "replicas", "front", "prefill"):
            if name == "prefill" and self.prefill is None:
                continue
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
        for name in _BY_PLACE:
            if name in self.engine:
                raise InvalidArgument(f"engine.{name} is Ray's to say: give engine.nnodes alone")
        for name in _BY_ROLE:
            if name in self.server:
                raise InvalidArgument(f"server.{name} is build_app's to say: prefill={{...}}")
        if self.standby_replicas and "autoscaling_config" in self.replicas:
            raise InvalidArgument(
                "standby_replicas goes with a fixed num_replicas; autoscaling by "
                "llmserve.ray.autoscaling:scale keeps an eighth of the replicas to spare"
            )
        if self.standby_replicas and not isinstance(self._num_replicas, int):
            raise InvalidArgument("standby_replicas needs replicas.num_replicas to be a number")
        if self.prefill is not None:
            self.replica_settings("prefill", "127.0.0.1", "x" * 16)
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

    def replica_settings(self, role: str, node_ip: str, key: str) -> ServerSettings:
        """Of a replica of this role. node_ip: where others reach it. key: of hand-overs, where the
        configuration has none."""
        if self.prefill is None:
            return self.server_settings
        _check_names(ServerSettings, "server", self.server)
        host = f"[{node_ip}]" if ":" in node_ip else node_ip
        own = {"hand_over_key": key, **self.server}
        return ServerSettings(**own, role=role, hand_over_address=f"{host}:0")

    @property
    def route_settings(self) -> RouteSettings:
        """Of the front."""
        _check_names(RouteSettings, "route", self.route)
        return RouteSettings(**self.route)

    @property
    def num_nodes(self) -> int:
        """Machines that a replica's ranks are on."""
        return int(self.engine.get("nnodes", 1))

    @property
    def num_cpus(self) -> float:
        """Of a replica, on each of its nodes."""
        return float(self.replica_options()["ray_actor_options"]["num_cpus"])

    @property
    def num_serving(self) -> int:
        """Replicas that have requests while all live; 0: all that there are."""
        return int(self._num_replicas) if self.standby_replicas else 0

    @property
    def _num_replicas(self) -> Any:
        return self.replicas.get("num_replicas", _NUM_REPLICAS)

    def replica_options(self) -> dict[str, Any]:
        """Of the deployment of replicas, with what it has where nothing is said."""
        given = dict(self.replicas)
        if self.standby_replicas:
            given["num_replicas"] = self._num_replicas + self.standby_replicas
        return self._options("LLMReplica", given)

    def prefill_options(self) -> dict[str, Any]:
        """Likewise, of those that compute prompts for others."""
        return self._options("LLMPrefill", dict(self.prefill or {}))

    def _options(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        actor = {
            "num_cpus": self.engine.get("num_threads") or 1,
            **self._memory(),
            **given.pop("ray_actor_options", {}),
        }
        if "autoscaling_config" not in given:
            given.setdefault("num_replicas", _NUM_REPLICAS)
        if self.num_nodes > 1:
            bundle = {"CPU": actor["num_cpus"], **actor.get("resources", {})}
            given.setdefault("placement_group_bundles", [bundle] * self.num_nodes)
            given.setdefault("placement_group_strategy", "STRICT_SPREAD")
        return {
            "name": name,
            "max_ongoing_requests": 1024,  # the engine queues, by its own policy
            "health_check_period_s": 1.0,
            "health_check_timeout_s": 10.0,
            "graceful_shutdown_wait_loop_s": 0.5,
            "graceful_shutdown_timeout_s": 60.0,
            **given,
            "ray_actor_options": actor,
        }

    def _memory(self) -> dict[str, int]:
        """What a replica takes, where the options fix it and the model is at hand. Ray looks at the
        memory that is asked for when it places actors, and kills some where too much is used."""
        is_fixed = any(self.engine.get(name) for name in _FIX_MEMORY)
        if not is_fixed or self.num_nodes > 1 or not Path(self.model).exists():
            return {}
        from llmserve.llm import LLM

        try:
            plan = LLM.plan(self.model, **self.engine)
        except LLMServeError:  # whose reason comes when a replica starts
            return {}
        return {"memory": plan.total_bytes + _BYTES_OF_PYTHON}

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
