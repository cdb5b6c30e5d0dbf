"""From the words of OpenAI's responses to those of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from llmserve.common.arguments import describe
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.bodies import ChatBody, VllmBody
from llmserve.server.routes.responses.bodies import ResponsesBody
from llmserve.server.routes.sampling import refuse_given
from llmserve.server.running.job import new_id

Message = dict[str, Any]
Item = dict[str, Any]

# Fields that a chat's body has, too, with the same meaning.
_SAME = (
    *VllmBody.__struct_fields__,
    *("model", "stream", "stop", "logit_bias", "structured_outputs", "cache_salt", "priority"),
    *("timeout", "service_tier", "parallel_tool_calls", "user"),
)
_LOGPROBS = "message.output_text.logprobs"
_NO_EFFECT = ("reasoning.encrypted_content",)
_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_body(body: ResponsesBody, messages: Sequence[Message]) -> ChatBody:
    """The conversation as a chat's. messages: all of it but the instructions. Raises ApiError that
    names the field."""
    _check(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    effort = (body.reasoning or {}).get("effort")
    variables = dict(body.chat_template_kwargs or {})
    if effort == "none":
        variables.setdefault("enable_thinking", False)
    has_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    tools, choice = _tools(body)
    return ChatBody(
        **fields,
        messages=_with_system(system, messages),
        max_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=choice,
        response_format=_response_format(body.text),
        reasoning_effort=effort,
        chat_template_kwargs=variables or None,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        logprobs=True if has_logprobs else None,
        top_logprobs=body.top_logprobs if has_logprobs else None,
    )


def _check(body: ResponsesBody) -> None:
    refuse_given(body, ("prompt",), "prompts are kept at OpenAI; send instructions and input")
    refuse_given(body, ("conversation",), "go on with previous_response_id")
    refuse_given(body, ("context_management", "moderation"), "leave it out")
    if body.background and body.store is False:
        raise _bad("background", "background can only be used when `store` is true")
    if body.background and body.stream:
        raise _bad("background", "a stream ends with its client; leave one of the two out")
    if body.truncation not in (None, "auto", "disabled"):
        raise _bad("truncation", f"must be auto or disabled, got {describe(body.truncation)}")
    for name in body.include or ():
        if name != _LOGPROBS and name not in _NO_EFFECT:
            raise _bad("include", f"{describe(name)} is nothing that this server has")


def _with_system(system: list[Message], messages: Sequence[Message]) -> list[Message]:
    """Templates know one system message, at the beginning."""
    own = [message for message in messages if message["role"] == "system"]
    if not own or not system:
        return [*system, *messages]
    if messages[0] is not own[0]:
        return [*system, *messages]
    merged = {"role": "system", "content": f"{system[0]['content']}\n\n{own[0]['content']}"}
    return [merged, *messages[1:]]


def read_input(given: str | list[Item]) -> tuple[list[Item], list[Message]]:
    """The items of an input as a response lists them, and the messages that they are in a chat.
    Raises ApiError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise _bad("input", "is empty; give at least one item")
    items, messages = [], _Messages()
    for idx, item in enumerate(given):
        messages.add(f"input[{idx}]", item)
        items.append(_listed(item))
    return items, messages.messages


def _listed(item: Item) -> Item:
    kind = item.get("type") or "message"
    listed = {"id": new_id("msg_" if kind == "message" else "item_"), "type": kind, **item}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": item["content"]}]
    return {"status": "completed", **listed}


class _Messages:
    """Gathers items; what the assistant thought, said and called in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[str] = []

    def add(self, label: str, item: Item) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._add_message(label, item)
        elif kind == "reasoning":
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            self._thoughts += [part["text"] for part in parts if _has_text(part)]
        elif kind == "function_call":
            self._add_call(label, item)
        elif kind == "function_call_output":
            text = _text(f"{label}.output", item.get("output"))
            call_id = str(item.get("call_id", ""))
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise _bad(
                "input",
                f"{label} has type {describe(kind)}; there are message, reasoning, function_call "
                f"and function_call_output",
            )

    def _add_message(self, label: str, item: Item) -> None:
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise _bad(
                "input",
                f"{label}.role must be user, assistant, system or developer, got {describe(role)}",
            )
        content = _text(f"{label}.content", item.get("content"))
        if role == "assistant":
            self._assistant()["content"] = content
        else:  # templates know no developer
            role = "system" if role == "developer" else role
            self.messages.append({"role": role, "content": content})

    def _add_call(self, label: str, item: Item) -> None:
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise _bad("input", f"{label} must have a name and arguments, both texts")
        function = {"name": name, "arguments": arguments}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self._thoughts:
            last = self._assistant()
        last.setdefault("tool_calls", []).append(call)

    def _assistant(self) -> Message:
        message: Message = {"role": "assistant", "content": ""}
        if self._thoughts:
            message["reasoning_content"] = "\n".join(self._thoughts)
            self._thoughts = []
        self.messages.append(message)
        return message


def _has_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _text(label: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad("input", f"{label} must be a text or a list of parts, got {describe(content)}")
    texts = []
    for idx, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal") if kind == "refusal" else None
        if kind in _TEXT_PARTS:
            text = part.get("text")
        if not isinstance(text, str):
            shown = f"type {kind!r}" if isinstance(kind, str) else describe(part)
            raise _bad(
                "input",
                f"{label}[{idx}] must be a part of type input_text or output_text with a text, got "
                f"{shown}: llmserve runs the text part of a model alone",
            )
        texts.append(text)
    return "\n".join(texts)


def _tools(body: ResponsesBody) -> tuple[list[dict[str, Any]], Any]:
    """The tools as a chat has them, and which of them is to be called."""
    tools = {}
    for idx, tool in enumerate(body.tools or ()):
        if tool.get("type") != "function":
            raise _bad(
                "tools",
                f"tools[{idx}] has type {describe(tool.get('type'))}, which OpenAI's own servers "
                f"run; give a function, and run it at the client",
            )
        function = {name: value for name, value in tool.items() if name != "type"}
        tools[str(tool.get("name"))] = {"type": "function", "function": function}
    choice = body.tool_choice
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
            allowed = [tool.get("name") for tool in choice["tools"] if isinstance(tool, Mapping)]
            tools = {name: tool for name, tool in tools.items() if name in allowed}
            choice = choice.get("mode", "auto")
        elif kind == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            known = "none, auto, required, a function or allowed_tools"
            raise _bad("tool_choice", f"must be {known}, got {describe(choice)}")
    return list(tools.values()), choice


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        raise _bad(
            "text", f"format.type must be text, json_object or json_schema, got {describe(kind)}"
        )
    return {"type": kind, "json_schema": form}


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param)
