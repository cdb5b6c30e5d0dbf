"""LFM 2: a list of calls as Python writes them, between <|tool_call_start|> and its end."""

from llmserve.parsers.pythonic_parser import PythonicStyle

STYLE = PythonicStyle(
    name="lfm2",
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
    separator=", ",
    signs=("<|tool_call_start|>", "<|tool_call_end|>"),
    hints=("<|tool_call_start|>",),
)
