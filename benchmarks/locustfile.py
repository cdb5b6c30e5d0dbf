"""Load by Locust, streaming on and off: `pip install locust`, start `llmserve serve`, then

locust -f benchmarks/locustfile.py --headless -u 32 -r 8 -t 60s --host http://127.0.0.1:8000
locust ... --tags stream        only streamed requests; or --tags whole
"""

import json
import random
import time

from locust import HttpUser, constant, tag, task

_PROMPTS = ("Once upon a time", "The fox", "In the forest there lived", "Tell me of the sea")
_MAX_TOKENS = 64


class Reader(HttpUser):  # type: ignore[misc]  # locust may not be there
    """A client that asks again as soon as it has its answer."""

    wait_time = constant(0)

    def _body(self, is_streamed: bool) -> dict[str, object]:
        prompt = f"{random.choice(_PROMPTS)} {random.randrange(1000)}"
        return {"prompt": prompt, "max_tokens": _MAX_TOKENS, "stream": is_streamed}

    @tag("whole")
    @task
    def whole(self) -> None:
        """One JSON document."""
        self.client.post("/v1/completions", json=self._body(False), name="whole")

    @tag("stream")
    @task
    def streamed(self) -> None:
        """Server-sent events; the time to the first one is reported beside the whole."""
        began = time.perf_counter()
        first_s = None
        with self.client.post(
            "/v1/completions",
            json=self._body(True),
            stream=True,
            name="stream",
            catch_response=True,
        ) as response:
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                if first_s is None:
                    first_s = time.perf_counter() - began
                if "error" in json.loads(line[6:]):
                    response.failure("error event")
        if first_s is not None:
            self.environment.events.request.fire(
                request_type="SSE",
                name="first token",
                response_time=1e3 * first_s,
                response_length=0,
                exception=None,
                context={},
            )
