"""Request bodies: bytes off the wire, bounded, to a typed record."""

import asyncio
import difflib
import re
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope

from llmserve.common.text_threads import on_text_thread
from llmserve.server.context import context
from llmserve.server.http.connection import own_connection
from llmserve.server.http.errors import ApiError
from llmserve.server.http.head import header
from llmserve.server.settings import ServerSettings

_T = TypeVar("_T", bound=msgspec.Struct)
_Result = TypeVar("_Result")

# A body of so many bytes is translated in less than a millisecond, for which other streams may
# wait.
_MAX_BYTES_IN_LOOP = 2**14

# Schemas in the wild nest a dozen deep.
_MAX_JSON_DEPTH = 64
_NESTED = (dict, list)
# In the scope.
_BODY, _NUM_BYTES, _ARRIVED = "llmserve.body", "llmserve.num_body_bytes", "llmserve.arrived"
# Fields within a field that are left out one by one, where those that are unknown are.
_MAX_NUM_UNKNOWN = 16

_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$(.*)`)?$")
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_AT = re.compile(r" - at `\$\.?([^.\[`]*).*`$")


async def read_json(
    request: Request, kind: type[_T], settings: ServerSettings, any_media_type: bool = False
) -> _T:
    """The body as a record. any_media_type: programs of this protocol do not say that it is JSON;
    a page of another origin has to. Raises ApiError: 400 that names the field, 408, 413, 415, and
    503 where it has not come when the server drains."""
    scope = request.scope
    scope["llmserve.fields"] = kind.__struct_fields__  # for the errors of what follows
    if not any_media_type or header(scope, b"origin"):
        check_media_type(scope)
    data = await read_body(request, settings)
    try:
        record = _decode(data, kind, settings.is_lenient("unknown_fields"))
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    _check_depth(record)
    return record


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body's bytes. Raises ApiError: 408, 413, 503."""
    scope = request.scope
    if _BODY in scope:
        return bytes(scope.pop(_BODY))
    length = header(scope, b"content-length")
    if length.isdecimal() and int(length[:20]) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes)
    connection = own_connection(scope)
    has_come = connection is not None and connection.has_whole_body
    reading = _read(request.receive, settings.max_body_bytes)
    data = await (reading if has_come else _in_time(reading, request, settings.read_timeout))
    scope[_NUM_BYTES] = len(data)
    scope[_ARRIVED] = asyncio.get_running_loop().time()
    return data


def give_back(request: Request, data: bytes) -> None:
    """For who reads the body after one who looked into it."""
    request.scope[_BODY] = data


def check_media_type(scope: Scope) -> None:
    """Raises ApiError (415) for what does not say that it is JSON."""
    media_type = header(scope, b"content-type").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415,
            f"the body must be JSON, and the Content-Type application/json, got "
            f"{media_type[:80]!r}",
        )


def _decode(data: bytes, kind: type[_T], ignores_unknown: bool) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if not ignores_unknown or not _UNKNOWN.search(str(error)):
            raise
    fields = msgspec.json.decode(data)
    fields = {name: fields[name] for name in kind.__struct_fields__ if name in fields}
    for _ in range(_MAX_NUM_UNKNOWN):
        try:
            return msgspec.convert(fields, kind)
        except msgspec.ValidationError as error:
            unknown = _UNKNOWN.search(str(error))
            inner = fields.get((unknown[2] or "").removeprefix(".")) if unknown else None
            if unknown is None or not isinstance(inner, dict):
                raise
            del inner[unknown[1]]
    return msgspec.convert(fields, kind)


def num_body_bytes(request: Request) -> int:
    """Of a request whose body has been read, and of what it refers to."""
    return int(request.scope[_NUM_BYTES])


def add_body_bytes(request: Request, num_bytes: int) -> None:
    """Its body refers to so many bytes more."""
    request.scope[_NUM_BYTES] += num_bytes


async def off_the_loop(request: Request, call: Callable[[], _Result]) -> _Result:
    """What `call` makes of the body, which takes the time of all its bytes: on a thread where they
    are many."""
    num_bytes = num_body_bytes(request)
    if num_bytes <= _MAX_BYTES_IN_LOOP:
        return call()
    return await on_text_thread(num_bytes, call)


def arrived_at(scope: Scope) -> float:
    """When the last of a body came that has been read, by the loop's clock."""
    return float(scope[_ARRIVED])


async def _in_time(
    reading: Coroutine[Any, Any, bytes], request: Request, timeout_s: float
) -> bytes:
    """What the client may take long to send. timeout_s: 0: no bound."""
    try:
        with context(request).activity.reading():
            return await asyncio.wait_for(reading, timeout_s or None)
    except asyncio.TimeoutError:
        raise ApiError(
            408, f"the body did not come within {timeout_s:g} seconds (read_timeout)"
        ) from None
    finally:
        reading.close()  # it may not have begun


async def _read(receive: Receive, max_bytes: int) -> bytes:
    data = bytearray()
    is_whole = False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body ended early")
        data += message.get("body", b"")
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
        is_whole = not message.get("more_body", False)
    return bytes(data)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the body is longer than {max_bytes} bytes (max_body_bytes)",
        code="request_too_large",
    )


def _check_depth(record: msgspec.Struct) -> None:
    """Of what has no type of its own: messages, schemas. The decoder has a bound of its own, too
    large to hand on."""
    level: list[Any] = list(msgspec.structs.astuple(record))
    for _ in range(_MAX_JSON_DEPTH):
        nested = [value for value in level if type(value) in _NESTED]
        if not nested:
            return
        inner = (items.values() if type(items) is dict else items for items in nested)
        level = list(chain.from_iterable(inner))
    raise ApiError(400, f"the body is nested deeper than {_MAX_JSON_DEPTH}")


def _invalid(message: str, kind: type[msgspec.Struct]) -> ApiError:
    """400 that names the field, and for an unknown one the nearest known."""
    if unknown := _UNKNOWN.search(message):
        name = unknown[1]
        near = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near and not unknown[2] else ""
        return ApiError(
            400,
            f"{unknown[2] or ''}{'.' if unknown[2] else ''}{name[:80]} is not a parameter of this "
            f"route{hint}".removeprefix("."),
            param=name[:80],
            code="unknown_parameter",
        )
    if missing := _MISSING.search(message):
        text = f"{missing[1]} is missing"
        return ApiError(400, text, param=missing[1], code="missing_required_parameter")
    at = _AT.search(message)
    param = at[1] if at and at[1] else None
    text = message.replace(" - at `$.", " at `")
    return ApiError(400, f"{param}: {text}" if param else text, param=param, code="invalid_type")
