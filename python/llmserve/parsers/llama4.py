"""Llama 4: [weather(city="Rome"), now()], where the text starts or between <|python_start|> and
<|python_end|>."""

from llmserve.parsers.pythonic_parser import PythonicStyle

STYLE = PythonicStyle(
    name="llama4_pythonic",
    begin="<|python_start|>",
    end="<|python_end|>",
    is_bare=True,
    section=("[", "]"),
    separator=", ",
    signs=("<|python_start|>", "<|python_end|>"),
    hints=(("<|python_start|>", "[func_name1("),),
)
