"""GigaChat 3: a message whose head says that it is a call, and an object of JSON. In GigaChat 3.1
that head is a sign."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="gigachat3",
    begin="function call<|role_sep|>",
    other_begins=(
        "<|message_sep|>\n\nfunction call<|role_sep|>",
        "<|message_sep|>\n\n<|function_call|>",
        "<|function_call|>",
    ),
    ends=("<|message_sep|>",),
    section=("function call<|role_sep|>\n", ""),
    separator="<|message_sep|>\n\nfunction call<|role_sep|>\n",
    signs=("<|role_sep|>", "<|message_sep|>", "<|function_call|>"),
    hints=("function call<|role_sep|>", "<|function_call|>"),
)
