"""GLM 4.5 and later: <tool_call>NAME, then <arg_key>key</arg_key><arg_value>value</arg_value> for
each argument, and </tool_call>."""

from llmserve.parsers.keyed_parser import KeyedStyle

STYLE = KeyedStyle(
    name="glm45",
    aliases=("glm47",),
    begin="<tool_call>",
    end="</tool_call>",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    call=("<tool_call>", "</tool_call>"),
    separator="\n",
    signs=(
        *("<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    hints=("<arg_key>",),
)
