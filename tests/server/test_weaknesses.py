"""What bit other servers (docs/security.md): that each row's tests exist, and those rows that have
no other place."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import llmserve
import msgspec
import pytest
from llmserve import demo_model_path
from llmserve.server.options import SETTINGS
from llmserve.server.routes import bodies
from serving import RunningServer, http_request, start_command

ROOT = Path(__file__).parents[2]
PACKAGE = Path(llmserve.__file__).parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
# `tests/unit/test_x.py::test_y`, or a test of the file that was named last in the row.
REFERENCE = re.compile(r"`(?:(tests/[\w/]+\.\w+))?(?:::)?(test_\w+)?`")
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
_PROMISED = PAGE[PAGE.index("## What is promised") : PAGE.index("## What is not promised")]
PROMISES = [line for line in _PROMISED.splitlines() if line.startswith("| ")][2:]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROUTES = {
    COMPLETIONS: (bodies.CompletionBody, {"prompt": "Once"}),
    CHAT: (bodies.ChatBody, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/embeddings": (bodies.EmbeddingBody, {"input": "Once"}),
    "/tokenize": (bodies.TokenizeBody, {"prompt": "Once"}),
    "/detokenize": (bodies.DetokenizeBody, {"tokens": [5]}),
}
# As they stand in a body: numbers that an index must never become.
HOSTILE = ["-1", "0", "2147483648", "-2147483649", "9223372036854775808", "1e400", "NaN", "-0.0"]


def num_tests(row: str) -> int:
    """How many a row names; each has to exist."""
    file, num_found = "", 0
    for found in REFERENCE.finditer(row):
        file = found[1] or file
        if not found[2]:
            continue
        names = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert found[2] in names, f"{file} has no {found[2]}"
        num_found += 1
    return num_found


def test_every_row_names_tests_that_exist() -> None:
    assert [int(row.split("|")[1]) for row in ROWS] == list(range(1, 26))
    for row in ROWS:
        assert num_tests(row) or "not there" in row, row


def test_every_promise_names_tests_that_exist() -> None:
    assert len(PROMISES) >= 15
    for promise in PROMISES:
        assert num_tests(promise), promise


def test_what_to_set_can_be_set() -> None:
    flags = set(re.findall(r"`--([a-z-]+)`", PAGE[PAGE.index("## What to set") :]))
    assert len(flags) > 10
    assert flags <= {name.replace("_", "-") for name in SETTINGS}


def test_nothing_is_unpickled_and_no_code_of_a_model_is_loaded() -> None:
    banned = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "torch.load", "yaml.load"), (path, called)
                continue
            else:
                continue
            assert not names & banned, (path, names)


@pytest.mark.parametrize("path", ROUTES)
def test_a_number_out_of_range_in_any_field_is_an_answer_or_a_400(
    server: RunningServer, path: str
) -> None:
    kind, given = ROUTES[path]
    for name in kind.__struct_fields__:
        for number in HOSTILE:
            for value in (number, f"[{number}]", f'{{"5": {number}}}'):
                fields = {key: json.dumps(own) for key, own in given.items()}
                if path in (COMPLETIONS, CHAT):
                    fields |= {"max_tokens": "2", "seed": "1"}
                fields[name] = value
                text = ",".join(f'"{key}":{own}' for key, own in fields.items())
                status, answer, _ = server.request("POST", path, f"{{{text}}}".encode())
                # 422: one that may run on another server, 429: more than fits at a time.
                assert status in (200, 400, 404, 422, 429), (text, answer)
    server.wait_until_idle()
    assert server.post(COMPLETIONS, prompt="Once", max_tokens=2)[0] == 200


def test_what_looks_like_a_special_token_in_a_message_ends_nothing(server: RunningServer) -> None:
    body: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    for text in ("</s>", "<|im_end|>", "<s><pad><unk>", "<|endoftext|>" * 50, "<image>", "\x00"):
        for penalty in (0.0, 2.0):
            message = {"role": "user", "content": text}
            more = {"presence_penalty": penalty, "repetition_penalty": 1.0 + penalty}
            status, answer = server.post(CHAT, messages=[message], **body, **more)
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == 4
            assert server.post(COMPLETIONS, prompt=text, **body, **more)[0] == 200


def test_a_url_in_a_message_is_never_opened(server: RunningServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    with socket.create_server(("127.0.0.1", 0)) as sentinel:
        sentinel.settimeout(0.3)
        visitors = []

        def wait() -> None:
            with suppress(OSError):
                visitors.append(sentinel.accept())

        thread = threading.Thread(target=wait)
        thread.start()
        for url in (f"http://127.0.0.1:{sentinel.getsockname()[1]}/x.png", secret.as_uri()):
            for part in (
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                {"type": "video_url", "video_url": {"url": url}},
            ):
                content = [{"type": "text", "text": "Look:"}, part]
                status, answer = server.post(CHAT, messages=[{"role": "user", "content": content}])
                assert status == 400
                assert "runs the text part of a model alone" in answer["error"]["message"]
                assert "sesame" not in json.dumps(answer)
        thread.join()
    assert not visitors


@pytest.mark.parametrize("name", ["prompt_embeds", "mm_processor_kwargs", "kv_transfer_params"])
def test_tensors_and_internals_are_no_part_of_a_body(server: RunningServer, name: str) -> None:
    status, answer = server.post(COMPLETIONS, prompt="Once", **{name: "gASVBA=="})
    assert (status, answer["error"]["param"]) == (400, name)


def test_tenants_with_salts_of_their_own_do_not_see_each_others_prefixes(
    server: RunningServer,
) -> None:
    prompt = "Once upon a time there was a little girl who liked to play in the garden. " * 4

    def cached(salt: str | None) -> tuple[int, int]:
        """Tokens that were found, and those that were computed: what its time depends on."""
        before = server.llm.get_metrics().num_prefill_tokens
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        answer = server.post(COMPLETIONS, **body)[1]
        computed = server.llm.get_metrics().num_prefill_tokens - before
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"]), computed

    num_tokens = len(server.llm.get_tokenizer().encode(prompt))
    salts = ("a", "b", None)
    assert [cached(salt) for salt in salts] == 3 * [(0, num_tokens)]
    for num_cached, num_computed in map(cached, salts):
        assert num_cached > 0
        assert num_cached + num_computed == num_tokens


@pytest.mark.long
@pytest.mark.parametrize("unit", ["a", "a ", "é", "\U0001f600"])
def test_megabytes_of_one_text_are_tokenized(server: RunningServer, unit: str) -> None:
    text = unit * (4_000_000 // len(unit.encode()))
    token_ids = server.llm.get_tokenizer().encode(text)
    assert len(token_ids) > 10_000
    # The server refuses it by its size, and lives.
    assert server.post(COMPLETIONS, prompt=text)[0] == 413
    assert server.post("/tokenize", prompt=text[: 2**16])[0] == 200


def test_the_memory_that_a_long_text_took_is_given_back() -> None:
    # A process of its own: in this one other tests' memory comes and goes.
    process, port = start_command(str(demo_model_path()), "--max-body-bytes", str(2**22))
    statm = Path(f"/proc/{process.pid}/statm")

    def count(text: str) -> int:
        status, answer, _ = http_request(port, "POST", "/tokenize", {"prompt": text})
        assert status == 200, answer
        return int(answer["count"])

    def resident_bytes() -> int:
        return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    try:
        count("é " * 40_000)  # what is made once
        before = resident_bytes()
        assert count("é " * 300_000) > 600_000
        assert resident_bytes() - before < 2**26  # else it keeps 140 MB
    finally:
        process.kill()
        process.wait()


def test_structs_of_bodies_take_no_unknown_field() -> None:
    for kind, _ in ROUTES.values():
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(b'{"no_such_field": 1}', type=kind)
