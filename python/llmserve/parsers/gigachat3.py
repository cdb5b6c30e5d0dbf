"""GigaChat 3: a message whose head says that it is a call, and an object of JSON."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="gigachat3",
    begin="function call<|role_sep|>",
    ends=("<|message_sep|>",),
    section=("function call<|role_sep|>\n", ""),
    separator="<|message_sep|>\n\nfunction call<|role_sep|>\n",
    signs=("<|role_sep|>", "<|message_sep|>"),
    hints=("function call<|role_sep|>",),
)
