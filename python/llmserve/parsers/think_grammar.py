"""The grammar of an answer that may be thought about first: anything in a section of reasoning, and
from there on what the answer has to match."""

import json
import re
from collections.abc import Callable

from llmserve.parsers.lark import Lark, joined
from llmserve.parsers.reasoning import ReasoningStyle
from llmserve.structured_outputs import GrammarSource

_WHITESPACE = r"/[ \n\r\t]{0,16}/"  # between the section and the answer


def thinking_first(
    source: GrammarSource,
    style: ReasoningStyle,
    is_open: bool,
    special_token_id: Callable[[str], int | None],
    has_head: bool = False,
) -> str:
    """Lark for a section of reasoning, then `source`; a Lark text of it has its rule `start` first
    and nowhere else. is_open: the prompt ends within a section; else the answer may begin with one.
    special_token_id: as in `call_grammar`. has_head: what begins an answer stands in `source`.

    >>> source = GrammarSource("regex", "regex", "a/b")
    >>> style = ReasoningStyle(name="think", starts=("<think>",), ends=("</think>",))
    >>> print(thinking_first(source, style, True, lambda text: None), end="")
    start: thought result
    thought: reasoning space
    reasoning[suffix="</think>"]: /(.|\\n)*/
    space: /[ \\n\\r\\t]{0,16}/
    result: /a\\/b/
    """
    lark = Lark(special_token_id)
    begin, end = style.starts[0], style.ends[0]
    answer = joined(
        lark.literal(style.between), "" if has_head else lark.literal(style.answer_begin)
    )
    if special_token_id(end) is None:
        suffix = json.dumps(end)
        rules = [joined("thought: reasoning space", answer)]
        rules.append(f"reasoning[suffix={suffix}]: /(.|\\n)*/")
    else:
        rules = [joined("thought: reasoning", lark.literal(end), "space", answer)]
        rules.append("reasoning: /(.|\\n)*/")
    opening = lark.literal(begin)
    if is_open:
        start = "start: thought result"
    elif style.answer_begin and not has_head:
        start = f"start: ({opening} thought | {lark.literal(style.answer_begin)}) result"
    else:
        start = f"start: ({opening} thought)? result"
    return "\n".join([start, *rules, f"space: {_WHITESPACE}", _answer(source)]) + "\n"


def _answer(source: GrammarSource) -> str:
    if source.kind == "json_schema":
        return f"result: %json {source.text}"
    if source.kind == "regex":
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", source.text, flags=re.DOTALL)
        return "result: /" + escaped.replace("\n", r"\n") + "/"
    return source.text.replace("start:", "result:", 1).rstrip("\n")
