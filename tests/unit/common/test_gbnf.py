"""Grammars in GBNF match what they say when they have become Lark: every text is asked of
llguidance, byte by byte."""

from __future__ import annotations

import llguidance
import pytest
from llmserve import InvalidArgument, StructuredOutputsParams
from llmserve.common.gbnf import gbnf_to_lark, is_gbnf

BYTES = llguidance.LLTokenizer("byte")


def matches(grammar: str, text: str) -> bool:
    lark = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(grammar))
    matcher = llguidance.LLMatcher(BYTES, lark)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
    token_ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


JSON = r"""
# as llama.cpp's users write it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES = [
    ('root ::= "a" [b-c]+ "/" | "\\n\\"x"', ["abc/", '\n"x'], ["a/", "abc", "ab/x", "n"]),
    ('root ::= [^"\\\\\\n]* "e"', ["e", "é日e", "  e", "\te"], ['"e', "\\e", "\ne"]),
    ('root ::= ws "x" ws\nws ::= [ \\t]*', ["x", " \tx  "], ["\nx", "y", "x y"]),
    ('root ::= "(" root? ")" | [0-9]{2,3}', ["()", "(())", "((12))", "123"], ["(", "1", "(1)"]),
    ('root ::= "" | "a"', ["", "a"], ["b"]),
    (
        'root ::= item ("," ws item)*\nws ::= [ ]?\n'
        'item ::= "true" | [a-z]+ | "[" ws (item ("," ws item)*)? ws "]"',
        ["true", "trx", "[a, [b,c]]", "[ ]", "[]", "a,b, c"],
        ["[a", "[a,]", "a ,b", ""],
    ),
    ('root ::= (\n "a" # one | other\n | "b" )\n  "c"', ["ac", "bc"], ["a", "cc"]),
    ("root ::= .{2} [a-] [\\x41-\\x43] [\\u00e9]", ["\n\naAé", "xy-Cé"], ["xy-Dé", "xyzAé"]),
    ('root ::= e\ne ::= e "+" t | t\nt ::= "x" | "(" e ")"', ["x", "(x+x)+x"], ["+x", "x+"]),
    ("root ::= 'it' \"'s\"", ["it's"], ["its"]),
    ('root ::= n{3} n{1,} m{,2}\nn ::= "a"\nm ::= "b"', ["aaaa", "aaaaabb"], ["aaa", "aaaabbb"]),
    ('Root-x ::= "q"\nroot ::= Root-x A_b\nA_b ::= "z"', ["qz"], ["q"]),
    ('root ::= (a)+\na ::= "(" a ")" | ""', ["()", "", "()(())"], ["(", ")"]),
    ('root ::= "a" "::=" "b"', ["a::=b"], ["ab"]),
    (JSON, ['{"a": [1, -2.5e3,\n  {}], "b\\u00e9": null}', "{}"], ['{"a" 1}', "[1]", '{"a": 01}']),
]


@pytest.mark.parametrize(("grammar", "yes", "no"), CASES)
def test_a_grammar_matches_what_it_says(grammar: str, yes: list[str], no: list[str]) -> None:
    assert [text for text in yes if not matches(grammar, text)] == []
    assert [text for text in no if matches(grammar, text)] == []


REFUSED = [
    ('root ::= "a', "line 1: a literal has no end"),
    ('root ::= "a"\nroot ::= "b"', "line 2: there are two rules root"),
    ('start ::= "a"', "the grammar has no rule root"),
    ('root ::= "a"\n  missing', "line 2: there is no rule missing"),
    ('root ::= ("a" | "b"', r"line 1: expected \)"),
    ("root ::= [z-a]", "line 1: the range z-a is empty"),
    ("root ::= []", r"line 1: \[\] has no character"),
    ('root ::= "a"{3,2}', "at most 2000 are taken"),
    ('root ::= "a"{9999}', "at most 2000 are taken"),
    ('root ::= "\\q"', "there is no escape"),
    ('root ::= "\\ud800"', "is no character"),
    ('root ::= "a" &', r"expected a literal, \[characters\], a name or \("),
    ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "the grammar is nested too deeply"),
]


@pytest.mark.parametrize(("grammar", "message"), REFUSED)
def test_a_grammar_that_is_none_is_refused_with_its_line(grammar: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^structured_outputs: grammar: .*{message}"):
        StructuredOutputsParams(grammar=grammar)


# Tokens of BYTES are bytes: 97 is "a", 98 "b".
TOKENS = [
    ('root ::= <[97]> "x" [y]*', ["ax", "axyy"], ["bx", "x"]),
    ('root ::= ("(" t ")")+\nt ::= <[98]> | !<[97]> "z"', ["(b)", "(b)(cz)"], ["(az)", "(a)"]),
    ('root ::= "q" <[97]>? <[98]>{2}', ["qabb", "qbb"], ["qab", "abb"]),
]


@pytest.mark.parametrize(("grammar", "yes", "no"), TOKENS)
def test_tokens_may_be_named_by_their_ids(grammar: str, yes: list[str], no: list[str]) -> None:
    test_a_grammar_matches_what_it_says(grammar, yes, no)


def test_special_tokens_may_be_named_by_how_they_are_written() -> None:
    grammar = "root ::= <|think|> [a-z]+ !<|end|> <|end|>"
    lark = gbnf_to_lark(grammar, {"<|think|>": 7, "<|end|>": 8})
    assert lark.splitlines()[1] == "r0: <[7]> P0 <[^8]> <[8]>"
    assert StructuredOutputsParams(grammar=grammar).grammar == grammar  # whatever the tokenizer
    with pytest.raises(InvalidArgument, match=r"line 1: there is no special token <\|think\|>"):
        gbnf_to_lark(grammar, {})


def test_lark_stays_as_it_is() -> None:
    lark = 'start: "a" | "::="\n'
    assert not is_gbnf(lark)
    assert StructuredOutputsParams(grammar=lark).source().text == lark
