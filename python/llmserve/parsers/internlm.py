"""InternLM: {"name": ..., "parameters": {...}} between <|action_start|><|plugin|> and
<|action_end|>, once a call."""

from llmserve.parsers.call_parser import JsonStyle

STYLE = JsonStyle(
    name="internlm",
    begin="<|action_start|><|plugin|>",
    ends=("<|action_end|>",),
    argument_key="parameters",
    call=("<|action_start|><|plugin|>\n", "<|action_end|>"),
    signs=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    hints=("<|action_start|><|plugin|>",),
)
