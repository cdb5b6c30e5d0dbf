"""What is parsed in Python, as targets: bytes go in, and nothing but the errors that a caller is
told of may come out. What has to hold besides is asserted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from llmserve.bench import http_stream
from llmserve.chat.chat_template import ChatTemplates, chat_request
from llmserve.common.gbnf import gbnf_to_lark
from llmserve.errors import InvalidArgument
from llmserve.parsers.deltas import Pieces, merged
from llmserve.parsers.registry import TOOL_STYLES, tool_parser
from llmserve.parsers.tool_style import ToolStyle
from llmserve.server.app import ROUTES
from llmserve.server.http.errors import ApiError
from llmserve.server.http.protocol import http_protocol
from llmserve.server.routes import bodies, request_body
from llmserve.server.routes.anthropic.bodies import MessagesBody
from llmserve.server.routes.llama_cpp.bodies import LlamaCompletionBody
from llmserve.server.routes.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from llmserve.server.routes.responses.bodies import ResponsesBody
from llmserve.server.settings import ServerSettings
from unit.call_texts import CASES, NAMES, SCHEMAS, SIGNS
from uvicorn.config import Config
from uvicorn.server import ServerState


@dataclass(frozen=True)
class Target:
    """One of them."""

    name: str
    run: Callable[[bytes], None]
    modules: Sequence[str]  # whose jumps guide
    seeds: Sequence[bytes]
    words: Sequence[bytes]


def _utf8(texts: Sequence[str]) -> list[bytes]:
    return [text.encode("utf-8", "replace") for text in texts]


def run_template(data: bytes) -> None:
    """A chat template of a model's files."""
    template = data.decode("utf-8", "replace")
    messages = [
        {"role": "user", "content": "a<b>"},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
    ]
    try:
        request = chat_request(True, False, None, {"enable_thinking": True})
        ChatTemplates({"default": template}, {"bos_token": "<s>"}, "it").render(
            messages, None, request
        )
    except InvalidArgument:
        pass


_TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{%- if tools %}{{ tools | tojson }}{% elif enable_thinking %}<think>{%- endif -%}",
    "{% macro f(a, b=1) %}{{ a ~ b }}{% endmacro %}{{ f(2) }}{% set ns = namespace(x=0) %}",
    "{% set ns.x = 1 %}{{ raise_exception('no') }}{% generation %}a{% endgeneration %}",
    "{{ messages[0:1] | map(attribute='role') | join(', ') }}{{ strftime_now('%Y') }}",
    "{% for i in range(3) %}{% if loop.last %}{% break %}{% endif %}{{ '%s' % i }}{% endfor %}",
    "{# c #}{{ 'a'.split('b')[-1].replace('a', 'b' * 3) }}{% filter upper %}x{% endfilter %}",
]
_TEMPLATE_WORDS = [
    *("{{", "}}", "{%", "%}", "{%-", "-%}", "{#", "#}", "|", "~", "**", "//", "[::-1]", "not in"),
    *("for", "in", "if", "else", "endif", "endfor", "set", "macro", "endmacro", "call", "filter"),
    *("messages", "range(9**9)", "'a' * 10**9", "__class__", "mro", "|safe", "|tojson(indent=2)"),
    *("|attr('x')", "loop.index0", "namespace()", "is mapping", "recursive", "1e400", "{}|string"),
    *("lipsum()", "cycler(1,2)", "joiner()", "|batch(2)", "|groupby('role')", "|round(99)"),
    *("|center(10**8)", "|wordwrap(1)", "|urlize", "|format(1)", "'%999999999d' % 1", "|sum"),
]


def run_calls(data: bytes) -> None:
    """What a model writes, in the style that the first byte chooses."""
    style = TOOL_STYLES[data[0] % len(TOOL_STYLES)] if data else TOOL_STYLES[0]
    text = data[1:].decode("utf-8", "replace")
    assert _read(style, [text]) == _read(style, text)


def _read(style: ToolStyle, pieces: Iterable[str]) -> tuple[str, str, list[object]]:
    """Reasoning, content and calls, whose ids are drawn."""
    parser = tool_parser(style, NAMES if style.is_bare else None, SCHEMAS)
    whole = Pieces()
    for piece in pieces:
        whole.add(parser.feed(piece))
    whole.add(parser.finish())
    calls = [call["function"] for call in merged(whole.tool_calls)]
    return whole.reasoning, whole.content, calls


_KINDS: tuple[type[msgspec.Struct], ...] = (
    *(bodies.ChatBody, bodies.CompletionBody, bodies.TokenizeBody, bodies.DetokenizeBody),
    *(bodies.EmbeddingBody, MessagesBody, ResponsesBody, OllamaChatBody, OllamaGenerateBody),
    LlamaCompletionBody,
)


def run_bodies(data: bytes) -> None:
    """A body, of the kind that the first byte chooses."""
    kind = _KINDS[data[0] % len(_KINDS)] if data else _KINDS[0]
    for is_lenient in (False, True):
        try:
            record = request_body._decode(data[1:], kind, is_lenient)
            request_body._check_depth(record)
        except msgspec.ValidationError as error:
            refused = request_body._invalid(str(error), kind)
            assert refused.status == 400
        except (ApiError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass


_BODIES = [
    b'\x00{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": true}',
    b'\x01{"prompt": ["a", [1, 2]], "n": 2, "logit_bias": {"5": 1.5}, "stop": ["x"]}',
    b'\x02{"messages": [], "tools": [{"type": "function", "function": {"name": "f"}}]}',
    b'\x03{"tokens": [1, 2, 3]}',
    b'\x05{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": []}]}',
    b'\x06{"input": [{"type": "message", "role": "user", "content": "x"}], "store": false}',
    b'\x07{"model": "m", "messages": [], "options": {"num_predict": 1}, "think": "low"}',
]
_JSON_WORDS = [
    b"null",
    b"true",
    b"-1",
    b"1e400",
    b"{}",
    b"[]",
    b'""',
    b'":"',
    b"\\u0000",
    b"\\ud800",
]


def run_gbnf(data: bytes) -> None:
    """A grammar of a request, in llama.cpp's notation."""
    with suppress(InvalidArgument):
        gbnf_to_lark("root ::= " + data.decode("utf-8", "replace"), {"<|end|>": 7})


class _Wire:
    """A transport that remembers what was written, and the connection that it is of."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    """The application: reads all of a body, and answers with its length."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(length).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _NeverEarly:
    def refuses(self, scope: Any) -> bool:
        return False


_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


async def _talk(data: bytes) -> None:
    """Bytes of a client, in pieces as the first byte says. Each answer is one."""
    settings = ServerSettings(max_body_bytes=256, read_timeout=0.0)
    kind = http_protocol(settings, lambda status: None, _NeverEarly())  # type: ignore[arg-type]
    config = Config(_answer, log_config=None, access_log=False, lifespan="off")
    config.load()
    state = ServerState()
    protocol = kind(config, state, {})
    wire = _Wire()
    protocol.connection_made(wire)
    size = 1 + data[0] % 40 if data else 1
    for begin in range(1, len(data), size):
        if wire.is_closed:
            break
        protocol.data_received(data[begin : begin + size])
        await asyncio.sleep(0)
    for _ in range(8):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    for task in list(state.tasks):
        task.cancel()
    await asyncio.gather(*state.tasks, return_exceptions=True)
    statuses = [int(status) for status in _STATUS.findall(wire.written)]
    assert all(status < 500 or status == 505 for status in statuses), wire.written
    assert not wire.written or wire.written.startswith(b"HTTP/1.1 "), wire.written


def run_http(data: bytes) -> None:
    """What comes over a connection."""
    asyncio.run(_talk(data))


_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
_REQUESTS = [
    b"\x27GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
    b"\x07" + _POST + b"Content-Length: 5\r\n\r\nabcde" + _POST + b"Content-Length: 0\r\n\r\n",
    b"\x27" + _POST + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nA: b\r\n\r\n",
    b"\x03GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"\x27GET / HTTP/1.1\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"\x27PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
_HTTP_WORDS = [
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\0", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n"),
    *(b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"HTTP/1.1", b"HTTP/0.9", b"0\r\n"),
    *(b"CONNECT x:1 ", b"ffffffffffffffff\r\n", b"Upgrade: websocket\r\n", b"-1", b": ", b"\xff"),
]


def run_events(data: bytes) -> None:
    """What a server sends to `llmserve bench serve`: a head, chunks, and events in them."""
    asyncio.run(_read_events(data))


async def _read_events(data: bytes) -> None:
    reader = asyncio.StreamReader(limit=2**16)
    reader.feed_data(data)
    reader.feed_eof()
    measured = http_stream.Measured(0.0, 1)
    try:
        status, lines = await http_stream._answer(reader)
        await http_stream.read_events(lines, measured)
        assert isinstance(status, int)
    except http_stream.FAILURES:
        pass
    assert measured.num_output_tokens >= 0
    assert isinstance(measured.error, str)


_EVENT = b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": 3}}\n\n'
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_STREAMS = [
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + _CHUNK + b"0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_EVENT) + _EVENT,
    b'HTTP/1.1 200 OK\r\n\r\n: comment\n\ndata: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n',
    b'HTTP/1.1 429 No\r\nConnection: close\r\n\r\n{"error": "x"}',
]

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            "template",
            run_template,
            ("llmserve/chat", "jinja2"),
            _utf8(_TEMPLATES),
            _utf8(_TEMPLATE_WORDS),
        ),
        Target(
            "calls",
            run_calls,
            ("llmserve/parsers",),
            [
                bytes([[style.name for style in TOOL_STYLES].index(name)]) + text.encode()
                for name, text, _, _ in CASES
            ],
            _utf8(SIGNS),
        ),
        Target("bodies", run_bodies, ("llmserve/server/routes",), _BODIES, _JSON_WORDS),
        Target(
            "gbnf",
            run_gbnf,
            ("llmserve/common/gbnf",),
            _utf8(['"a" [b-z]+ | x\nx ::= ("c" | root){2,3}', "<[12]> !<|end|> . [^a\\x41]"]),
            _utf8(["::=", "|", "(", ")", "{1,}", "*", "<[1]>", "!", "\\U0010ffff", "[^", "\n"]),
        ),
        Target("http", run_http, ("llmserve/server/http", "uvicorn"), _REQUESTS, _HTTP_WORDS),
        Target("events", run_events, ("llmserve/bench",), _STREAMS, [*_HTTP_WORDS, *_JSON_WORDS]),
    )
}
assert ROUTES  # the application is imported: no target pays for it
