"""FunctionGemma: call:NAME{key:<escape>text<escape>,other:3}, between <start_function_call> and its
end, once a call."""

from llmserve.parsers.escaped_parser import EscapedStyle

STYLE = EscapedStyle(
    name="functiongemma",
    begin="<start_function_call>",
    end="<end_function_call>",
    quote="<escape>",
    call=("<start_function_call>", "<end_function_call>"),
    signs=("<start_function_call>", "<end_function_call>", "<escape>"),
    hints=("<start_function_call>",),
)
