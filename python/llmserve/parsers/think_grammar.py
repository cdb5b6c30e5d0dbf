"""The grammar of an answer that may be thought about first: anything between <think> and </think>,
and from there on what the answer has to match."""

import json
import re
from collections.abc import Callable

from llmserve.structured_outputs import GrammarSource

_WHITESPACE = r"/[ \n\r\t]{0,16}/"  # between the section and the answer


def thinking_first(
    source: GrammarSource,
    section: tuple[str, str],
    is_open: bool,
    special_token_id: Callable[[str], int | None],
) -> str:
    """Lark for a section of reasoning, then `source`; a Lark text of it has its rule `start` first
    and nowhere else. section: what opens and ends it. is_open: the prompt ends within one; else the
    answer may begin with one. special_token_id: as in `call_grammar`.

    >>> source = GrammarSource("regex", "regex", "a/b")
    >>> print(thinking_first(source, ("<think>", "</think>"), True, lambda text: None), end="")
    start: thought result
    thought: reasoning space
    reasoning[suffix="</think>"]: /(.|\\n)*/
    space: /[ \\n\\r\\t]{0,16}/
    result: /a\\/b/
    """
    begin, end = section
    end_id = special_token_id(end)
    if end_id is None:
        rules = ["thought: reasoning space", f"reasoning[suffix={json.dumps(end)}]: /(.|\\n)*/"]
    else:
        rules = [f"thought: reasoning <[{end_id}]> space", "reasoning: /(.|\\n)*/"]
    begin_id = special_token_id(begin)
    opening = json.dumps(begin) if begin_id is None else f"<[{begin_id}]>"
    start = "start: thought result" if is_open else f"start: ({opening} thought)? result"
    return "\n".join([start, *rules, f"space: {_WHITESPACE}", _answer(source)]) + "\n"


def _answer(source: GrammarSource) -> str:
    if source.kind == "json_schema":
        return f"result: %json {source.text}"
    if source.kind == "regex":
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", source.text, flags=re.DOTALL)
        return "result: /" + escaped.replace("\n", r"\n") + "/"
    return source.text.replace("start:", "result:", 1).rstrip("\n")
