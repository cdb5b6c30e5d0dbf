"""`build_app`: a Ray Serve application of one model, with llmserve's own server and router."""

import secrets
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from llmserve.ray.config import RayConfig
from llmserve.ray.front import RayFront
from llmserve.ray.replica import LLMReplica
from llmserve.route.app import create_app


@serve.ingress()
class Front:
    """What HTTP comes to."""

    def __init__(self, config: RayConfig, replicas: Any, prefill: Any = None) -> None:
        self._front = RayFront(replicas, config.route_settings, prefill)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._front)


def build_app(config: Mapping[str, Any] | RayConfig) -> serve.Application:
    """An application for `serve.run`, or `import_path: llmserve.ray:build_app` in Ray's YAML.

    config: model (a path that every node has, or a Hub id), served_model_name, engine (the other
    arguments of AsyncLLM), server (ServerSettings of each replica), route (RouteSettings of the
    front), replicas, front and prefill (options of their `serve.deployment`: num_replicas,
    autoscaling_config, ray_actor_options ...; with prefill, replicas of their own compute prompts),
    standby_replicas. Raises InvalidArgument that names the field.
    """
    found = RayConfig.of(config)
    route = found.route_settings

    def deployed(options: dict[str, Any], num_serving: int = 0) -> Any:
        router = RequestRouterConfig(
            request_router_class="llmserve.ray.request_router.PrefixRouter",
            request_router_kwargs={
                "policy": route.policy,
                "assumed_blocks": route.assumed_blocks,
                "num_serving": num_serving,
            },
        )
        return serve.deployment(LLMReplica).options(**{"request_router_config": router, **options})

    replicas = deployed(found.replica_options(), found.num_serving)
    front = serve.deployment(Front).options(**found.front_options())
    if found.prefill is None:
        return front.bind(found, replicas.bind(found))
    key = secrets.token_hex(16)  # of this application, where the configuration has none
    prefill = deployed(found.prefill_options())
    return front.bind(
        found, replicas.bind(found, "decode", key), prefill.bind(found, "prefill", key)
    )
