"""Olmo 3: calls as Python writes them, a line each, between <function_calls> and its end."""

from llmserve.parsers.pythonic_parser import PythonicStyle

STYLE = PythonicStyle(
    name="olmo3",
    begin="<function_calls>",
    end="</function_calls>",
    is_list=False,
    section=("<function_calls>", "</function_calls>"),
    separator="\n",
    signs=("<function_calls>", "</function_calls>"),
    hints=("<function_calls>",),
)
