"""Llama 3: {"name": ..., "parameters": {...}}, several with semicolons, where the text starts or
after <|python_tag|>."""

from llmserve.parsers.call_parser import ToolStyle

STYLE = ToolStyle(
    name="llama3_json",
    begin="<|python_tag|>",
    separator=";",
    argument_key="parameters",
    is_list=True,
    is_bare=True,
    special_tokens=("<|python_tag|>",),
    hints=('"parameters": dictionary of argument name', "Environment: ipython"),
)
