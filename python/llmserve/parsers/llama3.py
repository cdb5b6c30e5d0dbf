"""Llama 3: {"name": ..., "parameters": {...}}, several with semicolons, where the text starts or
after <|python_tag|>."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="llama3_json",
    aliases=("llama4_json", "llama3"),
    begin="<|python_tag|>",
    more=";",
    argument_key="parameters",
    is_list=True,
    is_bare=True,
    section=("[", "]"),
    separator=", ",
    has_section_of_one=False,
    signs=("<|python_tag|>",),
    hints=(
        "<|python_tag|>",
        '"parameters": dictionary of argument name',
        "Environment: ipython",
    ),
)
