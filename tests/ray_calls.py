"""An application on Ray for tests, and the simplest client of it."""

from __future__ import annotations

import http.client
import json
import re
from collections import Counter
from typing import Any

from llmserve import demo_model_path

DEADLINE_S = 240.0
# A machine that does much besides starves Ray's own processes of their short deadlines.
PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_register_timeout_seconds": "240",
}
ENGINE = {"num_threads": 1, "kv_cache_memory_bytes": 2**24}
MODEL = str(demo_model_path())


def config(**more: Any) -> dict[str, Any]:
    replicas = {
        "num_replicas": 2,
        "ray_actor_options": {"num_cpus": 0.2},
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 120.0,
        "graceful_shutdown_timeout_s": 120.0,
    }
    front = {"ray_actor_options": {"num_cpus": 0.1}, "health_check_timeout_s": 120.0}
    base = {
        "model": MODEL,
        "served_model_name": "demo",
        "engine": ENGINE,
        "replicas": replicas,
        "front": front,
        "route": {"tokenizer": MODEL},
    }
    return {**base, **more}


def request(port: int, path: str, body: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        method = "GET" if body is None else "POST"
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith("{") else text
    finally:
        connection.close()


def stream(port: int, into: list[Any], body: dict[str, Any]) -> None:
    """Reads a stream; `into` gets its chunks, and None once it has ended as it should."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
    response = connection.getresponse()
    assert response.status == 200
    while line := response.readline():
        if line.startswith(b"data: {"):
            into.append(json.loads(line[6:]))
        elif line.startswith(b"data: [DONE]"):
            into.append(None)
    connection.close()


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks if chunk for choice in chunk["choices"])


def counter(port: int, name: str) -> float:
    _, text = request(port, "/metrics")
    (line,) = [one for one in text.splitlines() if one.startswith(f"llmserve_route_{name}_total ")]
    return float(line.split()[1])


def answers(port: int) -> Counter[str]:
    """How many requests each replica has answered, by its name."""
    _, text = request(port, "/metrics")
    found = re.findall(r'^llmserve_route_answers_total{replica="(.*?)",.*} ([\d.]+)$', text, re.M)
    return Counter({name: int(float(number)) for name, number in found})


def replica_processes(deployment: str = "LLMReplica") -> list[Any]:
    """psutil's, of the application "demo"."""
    import psutil

    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if f"ServeReplica:demo:{deployment}" in " ".join(one.info["cmdline"] or ())
    ]
