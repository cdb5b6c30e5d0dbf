"""Conversations to prompts, by the chat templates that come with a checkpoint.

What comes out is what transformers' apply_chat_template (5.20) gives. In three cases the messages
are first brought to the form that the template knows, as vLLM does: content in parts becomes one
text, text becomes a part (templates of models that see images may know nothing else), and arguments
of tool calls as JSON text become an object, each for templates that would otherwise print them
wrongly.
"""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.chat.chat_messages import parse_conversations, plain_data
from llmserve.chat.tool_schema import tool_schema
from llmserve.checkpoint.model_files import JsonObject, read_bytes, read_json_object
from llmserve.checkpoint.special_tokens import SPECIAL_TOKENS, read_special_tokens
from llmserve.common.arguments import boolean, describe
from llmserve.errors import CorruptFile, InvalidArgument

if TYPE_CHECKING:
    import jinja2

_MAX_FILE_BYTES = 2**22
_RESERVED = (
    *SPECIAL_TOKENS,
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "conversation",
    "tokenize",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
    "dict",
    "cycler",
    "joiner",
)
# Stands at the end of a message that is to be continued; the space tells whether the template
# strips messages.
_END = "\U000f6d5e"

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """How a conversation is to be rendered, beside its messages."""

    add_generation_prompt: bool = False
    continue_final_message: bool = False
    tools: list[object] | None = None  # JSON schemas
    variables: Mapping[str, object] = field(default_factory=dict)  # the template's own


def chat_request(
    add_generation_prompt: object, continue_final_message: object, tools: object, variables: object
) -> ChatRequest:
    """The arguments of a call, checked. Raises InvalidArgument."""
    prompt = boolean("add_generation_prompt", add_generation_prompt)
    continues = boolean("continue_final_message", continue_final_message)
    if prompt and continues:
        raise InvalidArgument(
            "continue_final_message=True continues the last message and add_generation_prompt=True "
            "begins a new one; set one of them to False"
        )
    own = template_variables("chat_template_kwargs", variables)
    return ChatRequest(prompt, continues, _tools(tools), own)


def template_variables(argument: str, variables: object) -> dict[str, object]:
    """Of an argument, checked; none for None. Raises InvalidArgument."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise InvalidArgument(f"{argument} must be a dict, got {describe(variables)}")
    for name in variables:
        if not isinstance(name, str) or name in _RESERVED:
            raise InvalidArgument(
                f"{argument} cannot set {describe(name)}: it takes variables of the template's "
                f"own, such as enable_thinking"
            )
    return {name: plain_data(f"{argument}[{name!r}]", v) for name, v in variables.items()}


def _tools(tools: object) -> list[object] | None:
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidArgument(
            f"tools must be a list of JSON schemas or functions, got {describe(tools)}"
        )
    schemas = [tool_schema(f"tools[{idx}]", tool) for idx, tool in enumerate(tools)]
    return [plain_data(f"tools[{idx}]", schema) for idx, schema in enumerate(schemas)]


class ChatTemplates:
    """The chat templates of a tokenizer: one, or several by name, or none."""

    def __init__(
        self, named: Mapping[str, str], special_tokens: Mapping[str, str], label: str
    ) -> None:
        self._named = dict(named)
        self._special_tokens = tuple(special_tokens.items())
        self._label = label

    @classmethod
    def from_directory(cls, directory: Path, chat_template: object = None) -> "ChatTemplates":
        """What a tokenizer's folder holds, or `chat_template`, a template or the path of one, in
        its place. Raises InvalidArgument, CorruptFile."""
        config = read_json_object(directory, "tokenizer_config.json") or {}
        special = read_special_tokens(directory)
        published = _published(directory, config) if chat_template is None else {}
        label = f"the chat template of {directory}"
        return cls.from_named(published, special, label, chat_template)

    @classmethod
    def from_named(
        cls,
        named: Mapping[str, str],
        special_tokens: Mapping[str, str],
        label: str,
        chat_template: object = None,
    ) -> "ChatTemplates":
        """Templates by name, which errors call `label`, or `chat_template` in their place."""
        if chat_template is None:
            return cls(named, special_tokens, label)
        templates = cls({}, special_tokens, "chat_template")
        templates._named["default"] = templates._source(chat_template)
        templates._compiled(None, None)  # what the caller gave is looked at now
        return templates

    @property
    def source(self) -> str:
        """The text of all of them: what it shows is what the model was taught."""
        return "\n".join(self._named.values())

    @property
    def special_tokens(self) -> dict[str, str]:
        """As templates call them: "bos_token" …"""
        return dict(self._special_tokens)

    @property
    def names(self) -> list[str]:
        """Of the templates, "default" among them."""
        return sorted(self._named)

    def render(
        self, messages: object, chat_template: object, request: ChatRequest
    ) -> tuple[list[str], bool]:
        """The prompt of every conversation, and whether there is a list of them. Raises
        InvalidArgument."""
        conversations, is_batch = parse_conversations(messages)
        compiled = self._compiled(chat_template, request.tools)
        prompts = []
        for idx, conversation in enumerate(conversations):
            try:
                prompts.append(compiled.render(conversation, request))
            except InvalidArgument as error:
                if not is_batch:
                    raise
                raise InvalidArgument(f"messages[{idx}]: {error}") from error
        return prompts, is_batch

    def _compiled(self, chat_template: object, tools: object) -> "_CompiledTemplate":
        if chat_template is not None:
            source, label = self._source(chat_template), "chat_template"
            return _compile(source, label, self._special_tokens)
        if not self._named:
            raise InvalidArgument(
                "the model has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); pass chat_template, or use generate with a prompt in the "
                "model's own format"
            )
        name = "tool_use" if tools is not None and "tool_use" in self._named else "default"
        if name not in self._named:
            raise InvalidArgument(
                f"the model has several chat templates and none is the default; pass chat_template "
                f"as one of {', '.join(self.names)}"
            )
        return _compile(self._named[name], self._label, self._special_tokens)

    def _source(self, chat_template: object) -> str:
        """A template, the name of one of the model's, or a path."""
        if isinstance(chat_template, str):
            if chat_template in self._named:
                return self._named[chat_template]
            if any(character in chat_template for character in "{}\n"):
                return chat_template
        if isinstance(chat_template, str | os.PathLike) and os.fspath(chat_template):
            path = Path(os.fsdecode(chat_template))
            if "\0" not in str(path) and path.is_file():
                return _read_template(path.parent, path.name)
        raise InvalidArgument(
            f"chat_template must be a Jinja template, the path of one, or the name of one of the "
            f"model's ({', '.join(self.names) or 'it has none'}), got {describe(chat_template)}"
        )


def _read_template(directory: Path, name: str) -> str:
    data = read_bytes(directory, name, _MAX_FILE_BYTES)
    try:
        return (data or b"").decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{directory / name}: not UTF-8 at byte {error.start}") from error


def _published(directory: Path, config: JsonObject) -> dict[str, str]:
    """The folder's templates by name: files come before what tokenizer_config.json holds. The file
    chat_template.json is how processors of models that see images kept theirs."""
    names = {"default": "chat_template.jinja"}
    for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
        names[path.stem] = f"{path.parent.name}/{path.name}"
    files = {
        name: _read_template(directory, file)
        for name, file in names.items()
        if (directory / file).exists()
    }
    if files:
        return files
    older = read_json_object(directory, "chat_template.json") or {}
    return _configured(directory / "chat_template.json", older.get("chat_template")) or _configured(
        directory / "tokenizer_config.json", config.get("chat_template")
    )


def _configured(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named: dict[str, str] = {}
    for item in value if isinstance(value, list) else [value]:
        name = item.get("name") if isinstance(item, dict) else None
        template = item.get("template") if isinstance(item, dict) else None
        if not isinstance(name, str) or not isinstance(template, str):
            raise CorruptFile(
                f"{path}: chat_template must be a template or a list of objects with name and "
                f"template, got {describe(value)}"
            )
        named[name] = template
    return named


@functools.lru_cache(maxsize=32)
def _compile(
    source: str, label: str, special_tokens: tuple[tuple[str, str], ...]
) -> "_CompiledTemplate":
    from llmserve.chat.template_sandbox import compile_template  # jinja2 takes 50 ms to import

    return _CompiledTemplate(compile_template(source, label), dict(special_tokens), label)


class _CompiledTemplate:
    """A template ready to run, and what it makes of the two forms of its input."""

    def __init__(
        self, template: "jinja2.Template", special_tokens: Mapping[str, str], label: str
    ) -> None:
        self._template = template
        self._constants = {"documents": None, **special_tokens}
        self._label = label

    def render(self, messages: list[Message], request: ChatRequest) -> str:
        if self._content_form == "text":
            messages = [_with_joined_parts(message) for message in messages]
        if self._content_form == "parts":
            messages = [_with_a_part(message) for message in messages]
        if any(m.get("tool_calls") for m in messages) and not self._takes_json_text:
            messages = [_with_parsed_arguments(message) for message in messages]
        if request.continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        text = self._render(messages, request)
        return self._cut(text) if request.continue_final_message else text

    def _render(self, messages: list[Message], request: ChatRequest) -> str:
        from llmserve.chat.template_sandbox import render_template

        variables = {
            **self._constants,
            **request.variables,
            "messages": messages,
            "tools": request.tools,
            "add_generation_prompt": request.add_generation_prompt,
        }
        return render_template(self._template, variables, self._label)

    def _cut(self, text: str) -> str:
        at = text.rfind(_END)
        if at < 0:
            raise InvalidArgument(
                f"{self._label} does not print the last message as it is, so that it cannot be "
                f"continued; use add_generation_prompt=True"
            )
        is_stripped = text[at + 1 : at + 2] != " "
        return text[:at].rstrip() if is_stripped else text[:at]

    @functools.cached_property
    def _content_form(self) -> str | None:
        """The form of content that the template prints, "text" or "parts"; None where both give the
        same, or where it cannot be told."""
        text = self._try_render([{"role": "user", "content": "probe"}])
        parts = self._try_render([_with_a_part({"role": "user", "content": "probe"})])
        if text == parts:
            return None
        if "probe" in (parts or "") and "probe" not in (text or ""):
            return "parts"
        return None if text is None else "text"

    @functools.cached_property
    def _takes_json_text(self) -> bool:
        """Whether arguments of a tool call as JSON text give what the object gives; also where the
        template does without tool calls."""
        text = self._try_render(_probe_call({"key": "value"}))
        # Where it cannot be told, messages are left as they are.
        return text is None or text == self._try_render(_probe_call('{"key": "value"}'))

    def _try_render(self, messages: list[Message]) -> str | None:
        try:
            return self._render(messages, ChatRequest())
        except InvalidArgument:
            return None


def _probe_call(arguments: object) -> list[Message]:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": "probe1234", "type": "function", "function": function}
    return [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def _with_joined_parts(message: Message) -> Message:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _with_a_part(message: Message) -> Message:
    text = message.get("content")
    if not isinstance(text, str):
        return message
    return {**message, "content": [{"type": "text", "text": text}]}


def _with_parsed_arguments(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    return {**call, "function": {**function, "arguments": value}}  # type: ignore[dict-item]


def _marked(message: Message) -> Message:
    """With _END after its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{_END} "}
    if isinstance(content, list) and content:
        last = {**content[-1], "text": f"{content[-1]['text']}{_END} "}
        return {**message, "content": [*content[:-1], last]}
    raise InvalidArgument(
        "continue_final_message=True needs a last message with content; it has none"
    )
