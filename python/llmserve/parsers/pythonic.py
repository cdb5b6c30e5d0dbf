"""Llama 3.2 and others: [weather(city="Rome"), now()], where the text starts."""

from llmserve.parsers.pythonic_parser import PythonicStyle

STYLE = PythonicStyle(
    name="pythonic",
    is_bare=True,
    section=("[", "]"),
    separator=", ",
    hints=("[func_name1(",),
)
