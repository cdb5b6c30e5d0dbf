"""Settings, where they come from, and quotas."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from llmserve import AsyncLLM, InvalidArgument, NotSupported, _core_testing
from llmserve.cli import main
from llmserve.server.http.errors import ApiError
from llmserve.server.main import listen
from llmserve.server.options import ENGINE_OPTIONS, SERVER_OPTIONS, SETTINGS, resolve
from llmserve.server.running.quotas import Quotas
from llmserve.server.settings import ServerSettings
from serving import RunningServer, running_server

MakeOracle = Callable[..., AsyncLLM]

QUOTA = 500  # tokens a minute


def test_a_flag_goes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "port: 1\nhost: ::1\napi-key: file\nmax_model_len: 64\nrequest_timeout: 5\n"
        "packed_cache_bytes: 2KiB\nserved_model_name: tale\nenable_lora: false\n"
    )
    monkeypatch.setenv("LLMSERVE_API_KEY", "environment")
    found = resolve({"port": 2}, str(path))
    assert (found.server.port, found.server.host, found.server.api_key) == (2, "::1", "environment")
    assert found.engine == {"max_model_len": 64, "packed_cache_bytes": 2048}
    assert found.server.request_timeout == 5.0
    assert found.origins["port"] == "flag"
    assert found.origins["api_key"] == "environment"
    assert found.origins["host"] == "file"
    lines = found.lines()
    assert {"served_model_name=['tale'] (file)", "model=[] (default)", "port=2 (flag)"} <= {*lines}
    assert {"max_model_len=64 (file)", "num_threads=None (default)", "dtype='auto' (default)"} <= {
        *lines
    }
    assert "max_stall_ms=1000 (default)" in lines
    settings = [line.partition("=")[0] for line in lines]
    assert sorted(settings) == sorted(SETTINGS), "each once, given or not"
    assert "environment" not in found.changed().replace("(environment)", "")


@pytest.mark.parametrize("text", ["0", '"0"'])
def test_a_size_of_0_turns_off_what_has_it_in_a_file_as_on_the_command_line(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"packed_cache_bytes: {text}\n")
    assert resolve({}, str(path)).engine == {"packed_cache_bytes": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "did you mean 'port'"),
        (
            "prefill_context_parallel_size: 2",
            "prefill_context_parallel_size=2 is not supported: ranks",
        ),
        ("port: x", "port must be an integer"),
        ("port: 70000", "65535"),
        ("- a", "must be a mapping"),
        ("a: [", "not YAML"),
        ("log_format: xml", "text or json"),
        ("ssl_keyfile: a.pem", "belong together"),
        ("request_timeout: -1", "at least 0"),
        ("max_body_bytes: 0", "max_body_bytes"),
        ("!!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_a_bad_file_is_refused_by_the_settings_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises((InvalidArgument, NotSupported), match=message):
        resolve({}, str(path))


def test_there_are_fewer_than_eighty_settings_and_each_says_what_it_is() -> None:
    options = (*ENGINE_OPTIONS, *SERVER_OPTIONS)
    assert len(options) < 80
    assert all(option.help for option in options)
    assert len({option.name for option in options}) == len(options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"role": "both halves"}, "role must be one of both, prefill, decode"),
        ({"role": "prefill"}, "role prefill needs hand_over_key"),
        ({"hand_over_key": "short"}, "at least 16 characters"),
        ({"hand_over_address": "localhost:1"}, "must be an IP address and a port"),
        ({"hand_over_address": "127.0.0.1"}, "must be an IP address and a port"),
        ({"hand_over_address": "127.0.0.1:70000"}, "must be an IP address and a port"),
        ({"hand_over_address": "[::]:0"}, "says no address that others can go to"),
        ({"hand_over_timeout": 0.0}, "hand_over_timeout must be above 0"),
    ],
)
def test_how_prompts_are_handed_over_is_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ServerSettings(**settings)
    ServerSettings(role="decode", hand_over_key="k" * 16, hand_over_address="[::1]:0")


def test_several_models_need_names(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["a", "b"], ["x=a", "x=b"], ["x=a", "y=b", "--served-model-name", "z"]):
        assert main(["serve", "--port", "0", *arguments]) == 2
    assert "NAME=MODEL" in capsys.readouterr().err


def test_two_models_answer_by_their_names(demo: AsyncLLM) -> None:
    from llmserve.server.models import Models, ServedModel

    models = Models([ServedModel(["a", "aa"], demo), ServedModel(["b"], demo)])
    assert [models.get(name).name for name in (None, "a", "aa", "b")] == ["a", "a", "a", "b"]
    with pytest.raises(ApiError, match="this server has: a, aa, b"):
        models.get("c")


def test_without_the_extra_the_command_names_it() -> None:
    code = """
import sys
sys.modules["starlette"] = None
from llmserve.cli import main
raise SystemExit(main(["serve"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'llmserve[serve]'" in done.stderr


def test_a_start_draws_a_seed_and_says_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served: list[int] = []
    monkeypatch.setattr("llmserve.server.logs.configure_logs", lambda _: None)
    monkeypatch.setattr(
        "llmserve.server.main.serve",
        lambda models, *_: served.append(models[0].llm.model_config.seed),
    )
    with caplog.at_level(logging.INFO):
        for seed in ([], [], ["--seed", "7"]):
            assert main(["serve", "--port", "0", *seed]) == 0
    assert re.findall(r"its seed is (\d+)", caplog.text) == [str(seed) for seed in served]
    assert len(set(served)) == 3
    assert served[2] == 7


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_quota_fills_steadily_and_is_each_keys_own() -> None:
    clock = _Clock()
    settings = ServerSettings(key_requests_per_minute=6, key_tokens_per_minute=1000)
    quotas = Quotas(settings, clock)

    def ask(key: str, num_tokens: int) -> None:
        quotas.check(key, num_tokens)
        quotas.take(key, num_tokens)

    for _ in range(6):
        ask("a", 10)
    with pytest.raises(ApiError, match="6 requests a minute") as refused:
        ask("a", 10)
    assert (refused.value.status, refused.value.retry_after) == (429, pytest.approx(10))
    ask("b", 10)
    clock.now = 10.0
    ask("a", 10)
    with pytest.raises(ApiError):
        ask("a", 10)
    clock.now = 600.0
    ask("a", 5000)  # more than a minute's: let in when the bucket is full
    clock.now += 60
    with pytest.raises(ApiError, match="1000 tokens") as refused:
        ask("a", 1)
    assert refused.value.retry_after == pytest.approx(180, abs=1)
    assert quotas.num_refused == 3
    quotas.give_back("a", 9000)  # no more than a full bucket
    ask("a", 1000)
    with pytest.raises(ApiError, match="1000 tokens"):
        ask("a", 1)


def test_a_key_past_its_quota_gets_a_429_and_others_do_not(demo: AsyncLLM) -> None:
    with running_server(demo, api_key="one,two", key_requests_per_minute=2) as server:
        body = {"prompt": "x", "max_tokens": 1}

        def status(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            answer = server.request("POST", "/v1/completions", body, headers)
            assert answer[0] == 200 or int(answer[2]["retry-after"]) >= 1
            return int(answer[0])

        assert [status("one") for _ in range(3)] == [200, 200, 429]
        assert status("two") == 200


def test_texts_that_are_only_tokenized_count_for_the_quota_of_requests(demo: AsyncLLM) -> None:
    limits = {"key_requests_per_minute": 3, "key_tokens_per_minute": 1}
    with running_server(demo, **limits) as server:
        server.activity.quotas._clock = lambda: 0.0  # nothing comes back with time
        assert server.post("/v1/completions", prompt="a b c", max_tokens=1)[0] == 200
        # Tokens are owed now, and these run none.
        assert server.post("/tokenize", prompt="x")[0] == 200
        assert server.post("/detokenize", tokens=[5])[0] == 200
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
            status, answer = server.post(path, **body)
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


def _num_left(server: RunningServer) -> int:
    """Tokens that a client without a key may still ask for."""

    def is_there(num_tokens: int) -> bool:
        with suppress(ApiError):
            server.activity.quotas.check("", num_tokens)
            return True
        return False

    return next(n for n in range(QUOTA, -1, -1) if is_there(n))


def test_a_quota_counts_what_a_request_took_and_not_what_it_might_have(
    make_oracle: MakeOracle,
) -> None:
    gate = _core_testing.StepGate(3)
    llm = make_oracle(0, gate=gate, max_num_seqs=1, max_model_len=64)
    with running_server(llm, key_tokens_per_minute=QUOTA, max_waiting_requests=1) as server:
        server.activity.quotas._clock = lambda: 0.0  # nothing comes back with time
        message = {"role": "user", "content": "hello"}
        body = {"messages": [message], "ignore_eos": True, "stream": True}
        socks = [server.open_stream("/v1/chat/completions", **body) for _ in range(2)]
        gate.wait_until_held()
        server.wait_until(lambda: len(server.activity.runs) == 2, "one runs and one waits")
        assert _num_left(server) == QUOTA - 2 * 64  # no more than the context
        status, answer = server.post("/v1/completions", prompt=[5], max_tokens=9)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert _num_left(server) == QUOTA - 2 * 64
        for sock in socks:
            sock.close()
        server.wait_until(lambda: not server.activity.runs, "both have left")
        num_prompt = len(server.post("/tokenize", messages=[message])[1]["tokens"])
        assert QUOTA - _num_left(server) in (num_prompt + 2, num_prompt + 3)  # of the one that ran
        gate.open()


def test_a_client_that_leaves_pays_for_what_it_did_not_read(make_oracle: MakeOracle) -> None:
    gate = _core_testing.StepGate(10)
    with running_server(make_oracle(0, gate=gate), key_tokens_per_minute=QUOTA) as server:
        server.activity.quotas._clock = lambda: 0.0
        sock = server.open_stream("/v1/completions", prompt=[5], max_tokens=90, ignore_eos=True)
        gate.wait_until_held()
        server.wait_until(lambda: server.activity.runs, "it is known")
        sock.close()
        server.wait_until(lambda: not server.activity.runs, "it has left")
        assert QUOTA - _num_left(server) in (10, 11)
        gate.open()


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded() -> None:
    (first,) = listen(ServerSettings(port=0))
    port = first.getsockname()[1]
    with pytest.raises(InvalidArgument, match=f"cannot listen on 127.0.0.1:{port}"):
        listen(ServerSettings(port=port))
    first.close()
