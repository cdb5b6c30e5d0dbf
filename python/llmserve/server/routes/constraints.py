"""How a request's output is constrained: response_format, structured_outputs, and tool_choice where
a tool has to be called."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from llmserve.common.arguments import describe
from llmserve.errors import InvalidArgument, NotSupported
from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.reasoning import ReasoningStyle
from llmserve.parsers.think_grammar import thinking_first
from llmserve.parsers.tool_grammar import (
    ANY_ARGUMENTS,
    call_grammar,
    is_strict,
    text_with_calls,
    tool_function,
)
from llmserve.parsers.tool_style import ToolStyle
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.bodies import ChatBody, GenerationBody
from llmserve.server.settings import ServerSettings
from llmserve.structured_outputs import StructuredOutputsParams, closed_schema
from llmserve.tokenization.tokenizer import Tokenizer

# Of bodies, for fields of structured_outputs.
_OTHER_NAMES = {
    **{f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")},
    **{"grammar": "grammar", "json_schema": "json"},
}
_MAX_NUM_TOOLS = 128
_CLOSES = "disable_additional_properties"
# How messages about StructuredOutputsParams speak to a client of the server.
_OF_JSON = {
    "StructuredOutputsParams": "structured_outputs",
    "no argument": "no field",
    "leave it at None": "leave it out",
}


def structured_outputs(
    body: GenerationBody, settings: ServerSettings
) -> StructuredOutputsParams | None:
    """What SamplingParams.structured_outputs is to be. Raises ApiError, InvalidArgument."""
    is_closed = settings.is_lenient("closed_schemas")
    formatted = (
        None if body.response_format is None else _of_format(body.response_format, is_closed)
    )
    given = _given(body)
    if given is None:
        return formatted
    if formatted is not None:
        raise ApiError(
            400,
            "response_format and structured_outputs both say what the text must match; give one",
            param="response_format",
        )
    try:
        return StructuredOutputsParams(**({_CLOSES: True} if is_closed else {}) | given)
    except (InvalidArgument, NotSupported) as error:
        message = str(error)
        for of_python, of_json in _OF_JSON.items():
            message = message.replace(of_python, of_json, 1)
        raise ApiError(400, message, param="structured_outputs") from None


def _given(body: GenerationBody) -> dict[str, Any] | None:
    """structured_outputs, or what older clients of vLLM's and those of llama.cpp say in its
    place."""
    given = [name for name in _OTHER_NAMES if getattr(body, name) not in (None, "")]
    if given and (body.structured_outputs is not None or len(given) > 1):
        other = "structured_outputs" if body.structured_outputs is not None else given[1]
        raise _bad(given[0], f"{other} says what the text must be; give one")
    if given:
        return {_OTHER_NAMES[given[0]]: getattr(body, given[0])}
    return body.structured_outputs


def _of_format(value: Mapping[str, Any], is_closed: bool) -> StructuredOutputsParams | None:
    """is_closed: objects of its schema have no properties but their own, also without strict."""
    if value.get("type") is None:
        raise _bad("response_format", "type is missing; it is text, json_object or json_schema")
    kind = value["type"]
    if kind == "text":
        return None
    if kind == "json_object" and not isinstance(value.get("schema"), Mapping):
        return StructuredOutputsParams(json_object=True)
    if kind == "json_object":  # llama.cpp's, and others'
        kind, value = "json_schema", {**value, "json_schema": {"schema": value["schema"]}}
    if kind != "json_schema":
        raise _bad(
            "response_format",
            f"type must be text, json_object or json_schema, got {describe(kind)}",
        )
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(schema, Mapping):
        raise _bad("response_format", "json_schema.schema must be a JSON schema, an object")
    try:
        is_closed = is_closed or inner.get("strict") is True
        return StructuredOutputsParams(json=schema, disable_additional_properties=is_closed)
    except InvalidArgument as error:
        raise _renamed(error, "response_format") from None


def tool_names(body: ChatBody) -> list[str]:
    """The tools that may be called, none where there are none. Raises ApiError, InvalidArgument."""
    choice = body.tool_choice
    tools = body.tools or []
    if len(tools) > _MAX_NUM_TOOLS:
        raise _bad("tools", f"there may be {_MAX_NUM_TOOLS} at most, got {len(tools)}")
    names = [tool_function(f"tools[{idx}]", tool)[0] for idx, tool in enumerate(tools)]
    if not _is_forced(body):
        return [] if choice == "none" else names
    if not tools:
        raise _bad("tool_choice", f"{describe(choice)} needs tools, and there are none")
    if choice == "required":
        return names
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _bad(
            "tool_choice",
            "must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}},"
            f" got {describe(choice)}",
        )
    if name not in names:
        raise _bad("tool_choice", f"there is no tool {describe(name)}; there are {names}")
    return [name]


def with_calls(
    body: ChatBody,
    given: StructuredOutputsParams | None,
    style: ToolStyle,
    tokenizer: Tokenizer,
    settings: ServerSettings,
) -> StructuredOutputsParams | None:
    """What the text must match where there are tools: a call that tool_choice asks for, a call or
    what response_format says, strict tools' schemas where they are called, or else what was
    `given`."""
    is_forced, tools = _is_forced(body), body.tools or []
    if _given(body) is not None:
        if is_forced:
            raise _bad("structured_outputs", "tool_choice says what the text must be; give one")
        return given
    is_text = not is_forced and given is None
    if is_text and not (style.marks_calls and any(map(is_strict, tools))):
        return None
    names = tool_names(body)
    is_closed = settings.is_lenient("closed_schemas")
    functions = [_tool_function(tool, is_closed or is_strict(tool)) for tool in tools]
    if is_text:  # what is not strict takes any object
        functions = [
            (name, schema if is_strict(tool) else ANY_ARGUMENTS)
            for tool, (name, schema) in zip(tools, functions, strict=True)
        ]
    is_parallel = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, dict)
    chosen = [function for function in functions if function[0] in names]
    grammar = text_with_calls if is_text else call_grammar
    calls = grammar(style, chosen, is_parallel, partial(special_token_id, tokenizer))
    if given is not None and not is_forced:
        begin = Lark(partial(special_token_id, tokenizer)).literal(style.answer_begin)
        answer = joined("answer:", begin, f"%json {given.source().text}")
        answer = f"start: calls | answer\n{answer}\n"
        calls = answer + calls.replace("start:", "calls:", 1)
    return StructuredOutputsParams(grammar=calls)


def _tool_function(tool: Mapping[str, Any], is_closed: bool) -> tuple[str, Mapping[str, object]]:
    name, schema = tool_function("tools", tool)
    closed = closed_schema(schema) if is_closed else schema
    assert isinstance(closed, Mapping)
    return name, closed


def with_reasoning(
    body: ChatBody,
    given: StructuredOutputsParams | None,
    style: ReasoningStyle | None,
    prompt: str,
    tokenizer: Tokenizer,
) -> tuple[StructuredOutputsParams | None, bool]:
    """What the text must match where the model may think first, and whether it may. A grammar of
    the request's own holds from the first token on, and so does everything once the prompt has an
    empty section."""
    if style is None:
        return given, False
    if given is None:
        return None, True
    prompt = prompt.rstrip()
    if given.grammar is not None and _given(body) is not None:
        return given, False
    if prompt.endswith(style.ends):
        return given, False
    token_id = partial(special_token_id, tokenizer)
    has_calls = given.grammar is not None
    grammar = thinking_first(given.source(), style, style.is_open(prompt), token_id, has_calls)
    return StructuredOutputsParams(grammar=grammar), True


def special_token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a token that is no text; None for what is text."""
    token_id = tokenizer.token_id(text)
    return token_id if token_id is not None and tokenizer.is_special(token_id) else None


def named_error(error: InvalidArgument, body: GenerationBody) -> Exception:
    """As the client is told: a grammar that is refused is named as `constraint_name` says."""
    return _renamed(error, constraint_name(body))


def constraint_name(body: GenerationBody) -> str:
    """The field of the body from which the grammar was made."""
    if isinstance(body, ChatBody) and _is_forced(body):
        return "tools"
    if _given(body) is not None:
        return "structured_outputs"
    is_formatted = body.response_format and body.response_format.get("type") != "text"
    return "response_format" if is_formatted else "tools"


def _is_forced(body: ChatBody) -> bool:
    return body.tool_choice not in (None, "auto", "none")


def _renamed(error: InvalidArgument, param: str) -> Exception:
    _, found, message = str(error).partition("structured_outputs: ")
    return _bad(param, message) if found else error


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
