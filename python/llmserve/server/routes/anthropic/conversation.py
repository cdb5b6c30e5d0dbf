"""From the words of Anthropic's API to those of a chat."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llmserve.common.arguments import describe
from llmserve.server.http.errors import ApiError
from llmserve.server.routes.anthropic.bodies import CountTokensBody, MessagesBody
from llmserve.server.routes.bodies import ChatBody
from llmserve.server.routes.sampling import refuse_given

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: CountTokensBody, can_bound_thinking: bool) -> ChatBody:
    """The same conversation as a chat's. can_bound_thinking: the model takes a budget for
    its thoughts. Raises ApiError that names the field."""
    refuse_given(body, ("mcp_servers", "container"), "tools run where the client is")
    messages = list(_system(body))
    for idx, message in enumerate(body.messages):
        messages += _messages(f"messages[{idx}]", message)
    thinks, budget = _thinking(body)
    choice, is_parallel = _tool_choice(body.tool_choice)
    config = body.output_config or {}
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": None if body.tools is None else list(map(_tool, body.tools)) or None,
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "chat_template_kwargs": {"enable_thinking": thinks, **(body.chat_template_kwargs or {})},
        "include_reasoning": thinks,
        "reasoning_effort": config.get("effort"),
        "response_format": _response_format(body.output_format or config.get("format")),
        # What the assistant has begun is gone on with.
        "continue_final_message": messages[-1]["role"] == "assistant" if messages else None,
    }
    if isinstance(body, MessagesBody):
        fields |= {
            "max_tokens": body.max_tokens,
            "stream": body.stream,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "seed": body.seed,
            "cache_salt": body.cache_salt,
            "timeout": body.timeout,
            "thinking_token_budget": budget if can_bound_thinking else None,
        }
    return ChatBody(**fields)


def _system(body: CountTokensBody) -> Iterator[dict[str, Any]]:
    if body.system:
        blocks = [body.system] if isinstance(body.system, str) else body.system
        texts = [
            block if isinstance(block, str) else _text(f"system[{idx}]", block)
            for idx, block in enumerate(blocks)
        ]
        yield {"role": "system", "content": "\n".join(texts)}


def _messages(label: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message may be several: results of tools have messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise _bad(f"{label}.role must be 'user' or 'assistant', got {describe(role)}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _bad(f"{label}.content must be a text or a list of blocks, got {describe(content)}")
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for idx, block in enumerate(content):
        where = f"{label}.content[{idx}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result" and role == "user":
            results.append(_result(where, block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(where, block))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_text(where, block))
    own: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        own["reasoning_content"] = "\n".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    is_empty = results and not texts
    return results if is_empty else [*results, own]


def _text(where: str, block: object) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    text = block.get("text") if isinstance(block, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        shown = f"a block of type {kind!r}" if isinstance(kind, str) else describe(block)
        raise _bad(
            f"{where} must be {{'type': 'text', 'text': ...}}, got {shown}: llmserve runs the text "
            f"part of a model alone"
        )
    return text


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(given, dict):
        raise _bad(f"{where} must have a name and an input that is an object")
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _result(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if not isinstance(content, str):
        if not isinstance(content, list):
            raise _bad(f"{where}.content must be a text or a list, got {describe(content)}")
        content = "\n".join(_text(f"{where}.content[{i}]", item) for i, item in enumerate(content))
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": content}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise _bad(
            f"tools: type {describe(kind)} is a tool that Anthropic's own servers run; give it a "
            f"name, a description and an input_schema, and run it at the client",
            "tools",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": given}


def _tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """As a chat says it, and whether there may be several calls."""
    if choice is None:
        return None, True
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, is_parallel
    if kind not in _CHOICES:
        known = ", ".join((*_CHOICES, "tool"))
        raise _bad(f"tool_choice.type must be one of {known}, got {describe(kind)}", "tool_choice")
    return _CHOICES[kind], is_parallel


def _thinking(body: CountTokensBody) -> tuple[bool, int | None]:
    """Whether the model may think, and for how many tokens at most."""
    thinking = body.thinking or {"type": "disabled"}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise _bad(
            f"thinking.type must be enabled, adaptive or disabled, got {describe(kind)}", "thinking"
        )
    if kind != "enabled":
        return kind == "adaptive", None
    if type(budget) is not int or budget < 1:
        raise _bad(
            f"thinking.budget_tokens must be an integer of at least 1, got {describe(budget)}",
            "thinking",
        )
    return True, budget


def _response_format(form: object) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise _bad(
            "output_config.format must be {'type': 'json_schema', 'schema': ...}, got "
            f"{describe(form)}",
            "output_config",
        )
    inner = {"schema": form.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": inner}


def _bad(message: str, param: str = "messages") -> ApiError:
    return ApiError(400, message, param=param)
