"""What llmserve.ray decides without Ray: its configuration, and how many replicas there should
be."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llmserve.ray
import pytest
from llmserve import LLM, demo_model_path
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.ray.autoscaling import ReplicaStats, desired_replicas, scale
from llmserve.ray.config import RayConfig

MODEL = str(demo_model_path())
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ([], "mapping"),
        ({}, "lacks model"),
        ({"model": MODEL, "replica": {}}, "'replica'"),
        ({"model": 7}, "model"),
        ({"model": MODEL, "engine": []}, "engine must be a mapping"),
        ({"model": MODEL, "engine": {"max_model_length": 5}}, "max_model_length"),
        ({"model": MODEL, "server": {"ports": 5}}, "'ports'"),
        ({"model": MODEL, "server": {"max_body_bytes": -1}}, "max_body_bytes"),
        ({"model": MODEL, "route": {"policy": "best"}}, "policy"),
        ({"model": MODEL, "route": {"port": 8000}}, "Ray Serve's to say"),
        ({"model": MODEL, "server": {"role": "prefill"}}, "server.role is build_app's"),
        ({"model": MODEL, "prefill": 2}, "prefill must be a mapping"),
        ({"model": MODEL, "prefill": {}, "server": {"hand_over_key": "short"}}, "16 characters"),
        ({"model": MODEL, "standby_replicas": -1}, "standby_replicas"),
        (
            {"model": MODEL, "standby_replicas": 1, "replicas": {"autoscaling_config": {}}},
            "a fixed num_replicas",
        ),
        (
            {"model": MODEL, "standby_replicas": 1, "replicas": {"num_replicas": "auto"}},
            "to be a number",
        ),
    ],
)
def test_a_bad_configuration_is_refused_by_the_fields_name(config: Any, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        RayConfig.of(config)


def test_options_of_deployments_are_given_on_over_what_is_the_default() -> None:
    config = RayConfig.of(
        {
            "model": MODEL,
            "engine": {"num_threads": 3},
            "replicas": {"autoscaling_config": {"max_replicas": 4}, "name": "Mine"},
        }
    )
    options = config.replica_options()
    assert options["ray_actor_options"] == {"num_cpus": 3}
    assert options["name"] == "Mine"
    assert "num_replicas" not in options
    assert config.front_options()["num_replicas"] == 1
    assert RayConfig.of({"model": MODEL}).replica_options()["num_replicas"] == 2
    assert config.name == Path(MODEL).name


def test_prefill_and_standbys_are_deployed_as_they_are_asked_for() -> None:
    config = RayConfig.of(
        {
            "model": MODEL,
            "replicas": {"num_replicas": 8},
            "prefill": {"num_replicas": 3, "ray_actor_options": {"num_cpus": 4}},
            "standby_replicas": 1,
        }
    )
    assert (config.replica_options()["num_replicas"], config.num_serving) == (9, 8)
    options = config.prefill_options()
    assert (options["name"], options["num_replicas"]) == ("LLMPrefill", 3)
    assert options["ray_actor_options"] == {"num_cpus": 4}
    settings = config.replica_settings("prefill", "fd00::5", "k" * 16)
    assert (settings.role, settings.hand_over_address) == ("prefill", "[fd00::5]:0")
    alone = RayConfig.of({"model": MODEL})
    assert alone.num_serving == 0
    assert not alone.replica_settings("both", "10.0.0.5", "k" * 16).hand_over_key


def test_a_model_on_several_nodes_has_a_bundle_a_node() -> None:
    engine: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 4, "num_threads": 8}
    config = RayConfig.of({"model": MODEL, "engine": engine})
    options = config.replica_options()
    assert options["placement_group_bundles"] == [{"CPU": 8}, {"CPU": 8}]
    assert options["placement_group_strategy"] == "STRICT_SPREAD"
    assert (config.num_nodes, config.num_cpus) == (2, 8.0)
    assert "placement_group_bundles" not in RayConfig.of({"model": MODEL}).replica_options()
    for name, value in (("node_rank", 1), ("master_addr", "10.0.0.5"), ("master_port", 5)):
        with pytest.raises(InvalidArgument, match=f"engine.{name} is Ray's to say"):
            RayConfig.of({"model": MODEL, "engine": {**engine, name: value}})


def test_a_replica_asks_for_the_memory_that_its_engine_takes() -> None:
    """Ray's monitor of memory kills what was placed where there is none."""
    engine: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 2**24}
    plan = LLM.plan(MODEL, **engine)
    options = RayConfig.of({"model": MODEL, "engine": engine}).replica_options()
    memory = options["ray_actor_options"]["memory"]
    assert plan.total_bytes < memory < plan.total_bytes + 2**30
    larger = {**engine, "kv_cache_memory_bytes": 2**26}
    options = RayConfig.of({"model": MODEL, "engine": larger}).replica_options()
    more = options["ray_actor_options"]["memory"] - memory
    assert abs(more - (2**26 - 2**24)) < 2**20  # blocks are whole
    # Where the cache takes what there is, and what is said, are not guessed at.
    assert "memory" not in RayConfig.of({"model": MODEL}).replica_options()["ray_actor_options"]
    given = {"ray_actor_options": {"memory": 5}}
    config = RayConfig.of({"model": MODEL, "engine": engine, "replicas": given})
    assert config.replica_options()["ray_actor_options"]["memory"] == 5


def test_replicas_follow_what_is_short_with_some_to_spare() -> None:
    def wanted(decode: float, prefill: float, kv: float, num: int = 8) -> int:
        rows = [ReplicaStats(decode, prefill, kv)] * num
        return desired_replicas(rows, min_replicas=2, max_replicas=32)

    assert wanted(0, 0, 0) == 2
    assert wanted(0.8, 0, 0) == 9  # 8, and an eighth to spare
    assert wanted(0.1, 0, 0.8) == 9
    assert wanted(0.8, 0.5, 0.2) == 18  # prompts wait
    assert wanted(0.2, 0, 0.1) == 3
    assert wanted(1, 1, 1, num=32) == 32
    with pytest.raises(InvalidArgument):
        desired_replicas([], min_replicas=3, max_replicas=2)


def test_the_policy_reads_what_replicas_say() -> None:
    context = SimpleNamespace(
        aggregated_metrics={
            "decode_share": {"a": 0.8, "b": 0.8},
            "prefill_share": {"a": 0.0},
            "kv_share": {"a": 0.3, "b": 0.2},
        },
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
    )
    assert scale(context) == (3, {})
    context.aggregated_metrics = None
    assert scale(context) == (1, {})


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install() -> None:
    with pytest.raises(NotSupported, match=r"llmserve\[ray\]"):
        _ = llmserve.ray.build_app
    with pytest.raises(AttributeError):
        _ = llmserve.ray.nothing


def test_the_manifest_has_a_configuration_that_is_taken() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "docs" / "kuberay" / "rayservice.yml").read_text("utf-8")
    serve = yaml.safe_load(yaml.safe_load(text)["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    assert application["import_path"] == "llmserve.ray:build_app"
    config = application["args"]
    for place in (config, config["route"]):  # which is on nobody's disk here
        for name in ("model", "tokenizer"):
            if name in place:
                place[name] = MODEL
    assert "autoscaling_config" in RayConfig.of(config).replica_options()
