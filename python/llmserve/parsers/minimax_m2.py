"""MiniMax-M2: <invoke name="NAME"><parameter name="KEY">value</parameter></invoke>, between
<minimax:tool_call> and </minimax:tool_call>."""

from llmserve.parsers.keyed_parser import KeyedStyle

STYLE = KeyedStyle(
    name="minimax_m2",
    aliases=("minimax-m2",),
    begin="<minimax:tool_call>",
    end="</minimax:tool_call>",
    function=('<invoke name="', '">', "</invoke>"),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    separator="\n",
    signs=("<minimax:tool_call>", "</minimax:tool_call>"),
    hints=("<minimax:tool_call>",),
)
