"""Any other model: the text starts with {"name": ..., "arguments": {...}}, or a list of them."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="json",
    is_list=True,
    is_bare=True,
    section=("[", "]"),
    separator=", ",
    has_section_of_one=False,
)
