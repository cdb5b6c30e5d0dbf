"""Texts in which models call tools, in every style, and how a test reads them."""
# ruff: noqa: RUF001  # DeepSeek's tokens have wide bars

from __future__ import annotations

import json
import random
from collections.abc import Iterable

from hypothesis import strategies as st
from llmserve.parsers.deltas import Pieces, merged
from llmserve.parsers.registry import (
    TOOL_STYLES,
    tool_parser,
    tool_style,
)
from llmserve.parsers.tool_style import Schemas

NAMES = ["weather", "add", "now"]
STYLES = [style.name for style in TOOL_STYLES]
WEATHER = '{"name": "weather", "arguments": {"city": "Rome, \\"IT\\"", "days": [1, 2]}}'
ADD = '{"arguments": {"x": {"a": "}{]"}, "y": null}, "name": "add"}'

SCHEMAS: Schemas = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array", "items": {"type": "integer"}},
        }
    },
    "add": {"properties": {"x": {"type": "object"}, "y": {"type": ["number", "null"]}}},
}

Calls = list[tuple[str, str]]


def parsed(style: str, pieces: Iterable[str], schemas: Schemas = SCHEMAS) -> tuple[str, Calls]:
    """Content and calls. Checks the form of what is streamed."""
    parser = tool_parser(tool_style(style), NAMES, schemas)
    whole = Pieces()
    for piece in pieces:
        whole.add(parser.feed(piece))
    whole.add(parser.finish())
    seen: list[int] = []
    ids = set()
    for delta in whole.tool_calls:
        if delta.index in seen:
            assert delta.index == seen[-1]
            assert delta.to_dict() == {
                "index": delta.index,
                "function": {"arguments": delta.arguments},
            }
        else:
            assert delta.index == len(seen)
            assert delta.to_dict()["type"] == "function"
            assert delta.name in NAMES
            seen.append(delta.index)
            ids.add(delta.id)
    assert len(ids) == len(seen)
    calls = [call["function"] for call in merged(whole.tool_calls)]
    return whole.content, [(c["name"], c["arguments"]) for c in calls]  # type: ignore[index]


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(len(text) + 1)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


ROME = ("weather", '{"city": "Rome, \\"IT\\"", "days": [1, 2]}')
SUM = ("add", '{"x": {"a": "}{]"}, "y": null}')
NOW = ("now", "{}")
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>", "Let me see.", [ROME]),
    (
        "hermes",
        f"<tool_call>{ADD}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n",
        "",
        [SUM, ROME],
    ),
    ("hermes", f"<tool_call>{WEATHER}</tool_call> and so on.\n", "and so on.\n", [ROME]),
    ("hermes", f"I ask. <tool_call>{ADD}</tool_call>\nThen I say.", "I ask. Then I say.", [SUM]),
    ("hermes", f"I ask:<tool_call>{ADD}</tool_call>Done.\n", "I ask:\nDone.\n", [SUM]),
    (
        "hermes",
        f"1\n\n<tool_call>{ADD}</tool_call> <tool_call>{WEATHER}</tool_call>2 "
        f"<tool_call>{ADD}</tool_call>\n",
        "1\n\n2",
        [SUM, ROME, SUM],
    ),
    ("hermes", f"1 <tool_call>{ADD}</tool_call> <tool_call> 2", "1 <tool_call> 2", [SUM]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"arguments": "{}", "name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>', "", [("now", '"x"')]),
    (
        "hermes",
        '<tool_call>{"arguments": "[3]", "name": "now"}</tool_call>',
        "",
        [("now", '"[3]"')],
    ),
    ("hermes", '<tool_call>{"id": 3, "x": [{}], "name": "now"}</tool_call>', "", [NOW]),
    ("llama3_json", ADD.replace("arguments", "parameters"), "", [SUM]),
    ("llama3_json", f"<|python_tag|>{WEATHER}; {ADD}", "", [ROME, SUM]),
    ("llama3_json", f"\n [{WEATHER}, {ADD}]\n", "", [ROME, SUM]),
    ("llama3_json", f"First: {WEATHER}", f"First: {WEATHER}", []),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {ADD}]", "", [ROME, SUM]),
    ("mistral", f"Yes.[TOOL_CALLS]{WEATHER}", "Yes.", [ROME]),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add{ }", "", [NOW, ("add", "{ }")]),
    ("mistral", 'So. [TOOL_CALLS][{"name": "now"}] Yes.', "So. Yes.", [NOW]),
    ("mistral", "a [TOOL_CALLS] b", "a [TOOL_CALLS] b", []),
    ("json", f"  [{WEATHER} , {ADD}]", "", [ROME, SUM]),
    ("json", WEATHER, "", [ROME]),
    ("json", '{"temperature": 3}', '{"temperature": 3}', []),
    ("json", "[1, 2]", "[1, 2]", []),
    ("json", "Hello, {}", "Hello, {}", []),
]


BEGINS, ENDS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def xml(name: str, **values: str) -> str:
    lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


DSML, DSML_END = "<｜DSML｜", "</｜DSML｜"


def invoke(name: str, **values: object) -> str:
    lines = [f'{DSML}invoke name="{name}">']
    for key, value in values.items():
        kind = "true" if isinstance(value, str) else "false"
        head = f'{DSML}parameter name="{key}" string="{kind}">'
        lines.append(f"{head}{value}{DSML_END}parameter>")
    return "\n".join([*lines, f"{DSML_END}invoke>"])


DSML_ROME = invoke("weather", city='Rome, "IT"', days=[1, 2])


def harmony(channel: str, text: str, end: str = "<|end|>") -> str:
    return f"<|channel|>{channel}<|message|>{text}{end}"


def to(name: str, arguments: str) -> str:
    return harmony(f"commentary to=functions.{name} <|constrain|>json", arguments, "<|call|>")


START = "<|start|>assistant"
X = '{"a": "}{]"}'
LIST_A = '{"city": "a", "days": [1, 2]}'
FACES = ("now", '{"a": "\U0001f600\ufffd", "b": ""}')
GEMMA_TAIL = "}<end_function_call>"
ENDED = "<|return|>"
LINES = ("weather", json.dumps({"city": 'a\n "<b>"\n', "days": [1, 2]}))
CASES += [
    ("qwen3_coder", "So. " + xml("weather", city='Rome, "IT"', days="[1, 2]"), "So.", [ROME]),
    ("qwen3_coder", xml("add", x=X, y="None") + "\n" + xml("now"), "", [SUM, NOW]),
    ("qwen3_coder", xml("weather", city='a\n "<b>"\n', days=" [1, 2]"), "", [LINES]),
    ("qwen3_coder", "<function=now></function></tool_call>Yes", "Yes", [NOW]),
    ("qwen3_coder", "<tool_call><function=now></tool_call>", "", [NOW]),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>3</parameter> x",
        " x".strip(),
        [("weather", '{"city": "3"}')],
    ),
    (
        "qwen3_coder",
        xml("now", a="3", b="three", c="true", d="NaN"),
        "",
        [("now", '{"a": 3, "b": "three", "c": true, "d": "NaN"}')],
    ),
    ("glm45", glm("weather", city='Rome, "IT"', days="[1, 2]") + glm("now"), "", [ROME, NOW]),
    ("glm45", glm("add", x=X, y="null").replace("\n", ""), "", [SUM]),
    ("glm45", "<tool_call>now</tool_call> Yes", "Yes", [NOW]),
    ("glm45", "<tool_call>now\n<arg_key>a</arg_key>b", "b", [("now", '{"a": null}')]),
    (
        "seed_oss",
        "<seed:tool_call><function=weather><parameter=city>Rome\n</parameter></function>"
        "</seed:tool_call>",
        "",
        [("weather", '{"city": "Rome\\n"}')],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="add">\n'
        f'<parameter name="x">{X}</parameter>\n<parameter name="y">null</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [NOW, SUM],
    ),
    (
        "deepseek_v3",
        f"{BEGINS}{CALL}function{SEP}weather\n```json\n{ROME[1]}\n```{CALL_END}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{ENDS}",
        "",
        [ROME, NOW],
    ),
    (
        "deepseek_v32",
        f"So.\n\n{DSML}function_calls>\n{DSML_ROME}\n{invoke('now')}\n{DSML_END}function_calls>",
        "So.",
        [ROME, NOW],
    ),
    ("deepseek_v31", f"So. {BEGINS}{CALL}add{SEP}{SUM[1]}{CALL_END}{ENDS}", "So.", [SUM]),
    ("deepseek_v31", f"{BEGINS}{CALL}now{SEP}{{}}{CALL}add{SEP}{SUM[1]}", "", [NOW, SUM]),
    ("deepseek_v31", f"{BEGINS}{CALL}now{SEP}{{}}{CALL_END}{ENDS}Yes", "Yes", [NOW]),
    (
        "kimi_k2",
        f"Yes.{SECTION}{kimi('functions.now:0', '{}')}{kimi('add:1', SUM[1])}{SECTION_END}",
        "Yes.",
        [NOW, SUM],
    ),
    ("granite", f"<|tool_call|>[{WEATHER}, {ADD}]", "", [ROME, SUM]),
    ("granite", f"<|tool_call|>{WEATHER}", "", [ROME]),
    ("phi4_mini_json", f"functools[{WEATHER},{ADD}]", "", [ROME, SUM]),
    ("jamba", f"So.\n<tool_calls>[{WEATHER}, {ADD}]</tool_calls>", "So.", [ROME, SUM]),
    ("longcat", f"<longcat_tool_call>{WEATHER}</longcat_tool_call>Yes", "Yes", [ROME]),
    (
        "internlm",
        f"So.<|action_start|><|plugin|>\n{ADD}<|action_end|>\n",
        "So.",
        [SUM],
    ),
    ("phi4_mini_json", f"<|tool_call|>[{ADD}]", "", [SUM]),
    ("phi4_mini_json", f"<|tool_call|>{ADD}<|/tool_call|>So.", "So.", [SUM]),
    ("phi4_mini_json", f"functools[{ADD}]\nSo.", "So.", [SUM]),
    (
        "pythonic",
        """ [weather(city='Rome, "IT"', days=[1, 2]), add(x={'a': "}{]"}, y=None), now()]""",
        "",
        [ROME, SUM, NOW],
    ),
    ("pythonic", f"[add(x={X}, y=null)] So.", "So.", [SUM]),
    (
        "pythonic",
        "[now(a=(1,), b=-1.5e3, c='\\u00e9\\'')]",
        "",
        [("now", '{"a": [1], "b": -1500.0, "c": "é\'"}')],
    ),
    ("llama4_pythonic", "<|python_start|>[now()]<|python_end|>Yes", "Yes", [NOW]),
    ("llama4_pythonic", "[now()]", "", [NOW]),
    ("openai", harmony("analysis", "") + START + to("weather", ROME[1] + "\n"), "", [ROME]),
    ("openai", harmony("final", "Yes.", "<|return|>"), "Yes.", []),
    ("openai", f"{harmony('commentary', 'I ask.')}{START}{to('now', '{}')}", "I ask.", [NOW]),
    (
        "openai",
        f" to=functions.add<|channel|>commentary json<|message|>{SUM[1]}",
        "",
        [SUM],
    ),
    ("openai", "Yes. 1 < 2", "Yes. 1 < 2", []),
    ("openai", to("now", ""), "", [NOW]),
]


STEP_CALL = "<｜tool_call_begin｜>function<｜tool_sep｜>"
GEMMA, GEMMA_END, ESCAPE = "<start_function_call>", "<end_function_call>", "<escape>"


def step(name: str, **values: str) -> str:
    head, name_end = '<steptml:parameter name="', '">'
    pairs = (f"{head}{k}{name_end}{v}</steptml:parameter>" for k, v in values.items())
    invoke = f'<steptml:invoke name="{name}">{"".join(pairs)}</steptml:invoke>'
    return f"{STEP_CALL}{invoke}<｜tool_call_end｜>"


def gemma(name: str, arguments: str) -> str:
    return f"{GEMMA}call:{name}{{{arguments}}}{GEMMA_END}"


STEP_ROME = step("weather", city='Rome, "IT"', days="[1, 2]")
GEMMA_ROME = gemma("weather", f'city:{ESCAPE}Rome, "IT"{ESCAPE},days:[1,2]')
CASES += [
    # A bracket too many is none of the call.
    ("deepseek_v31", f"{BEGINS}{CALL}now{SEP}{{}}}}{CALL_END}{ENDS}", f"}}{CALL_END}{ENDS}", [NOW]),
    ("mistral", "[TOOL_CALLS]now[ARGS]{}} x", "} x", [NOW]),
]
PY_ROME = """weather(city='Rome, "IT"', days=[1, 2])"""
CASES += [
    ("pythonic", "[now(),]", "", [NOW]),
    ("pythonic", "[weather(city='a', days=[1,2],)]", "", [("weather", LIST_A)]),
    ("pythonic", "[now(a='b", "", [("now", '{"a": "b')]),
    ("pythonic", "[now(a=1, b=c)] x", ")] x", [("now", '{"a": 1}')]),
    ("pythonic", "[now(a='\\ud83d\\ude00\\ud83d', b='\\x')]", "\\x')]", [FACES]),
    ("olmo3", f"So.\n<function_calls>{PY_ROME}\nnow()\n</function_calls>", "So.", [ROME, NOW]),
    ("olmo3", "<function_calls>\nnow()\n</function_calls>\nYes", "Yes", [NOW]),
    ("lfm2", f"<|tool_call_start|>[{PY_ROME}, now()]<|tool_call_end|>So.", "So.", [ROME, NOW]),
    (
        "step3",
        f"So.<｜tool_calls_begin｜>{STEP_ROME}\n{step('now')}<｜tool_calls_end｜>",
        "So.",
        [ROME, NOW],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo\nme\n<parameter=land>\nIt\n</function>\n"
        "</tool_call>",
        "",
        [("weather", '{"city": "Ro\\nme", "land": "It"}')],
    ),
    (
        "deepseek_v32",
        (
            '<D|function_calls>\n<D|invoke name="add">\n<D|parameter name="y" string="true">42'
            "</D|parameter>\n</D|invoke>\n</D|function_calls>"
        ).replace("D|", "\uff5cDSML\uff5c"),
        "",
        [("add", '{"y": 42}')],
    ),
    ("gigachat3", f"So.\n\nfunction call<|role_sep|>\n{WEATHER}", "So.", [ROME]),
    ("gigachat3", f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{WEATHER}", "So.", [ROME]),
    ("gigachat3", f"So.<|function_call|>{WEATHER}<|message_sep|>\n\n", "So.", [ROME]),
    ("xlam", f"[{WEATHER}, {ADD}]", "", [ROME, SUM]),
    ("xlam", f"So.\n```json\n[{WEATHER}]\n```", "So.", [ROME]),
    ("xlam", f"So.[TOOL_CALLS][{WEATHER}]", "So.", [ROME]),
    ("xlam", f"<tool_call>[{WEATHER}]</tool_call>", "", [ROME]),
    (
        "functiongemma",
        f"{GEMMA_ROME}{gemma('now', '')}",
        "",
        [ROME, NOW],
    ),
    (
        "functiongemma",
        gemma("add", f"x:{{a:{ESCAPE}}}{{]{ESCAPE}}},y:null"),
        "",
        [SUM],
    ),
    (
        "functiongemma",
        gemma("now", f"a:{{b:[{ESCAPE}x,<{ESCAPE},true,{{}}],c:d}} , e:<f,g:{ESCAPE}h"),
        "",
        [("now", '{"a": {"b": ["x,<", true, {}], "c": "d"}, "e": "<f", "g": "h' + GEMMA_TAIL)],
    ),
    ("jamba", f"<tool_calls>\n{WEATHER}\n{ADD}\n</tool_calls>", "", [ROME, SUM]),
    ("openai", f"<|channel|>final to=assistant<|message|>Yes.{ENDED}", "Yes.", []),
    (
        "openai",
        f"{harmony('analysis', 'Hm.')}{START} to=functions.add<|channel|>commentary"
        f"<|constrain|>json<|message|>{SUM[1]}<|call|>",
        "",
        [SUM],
    ),
]


BROKEN: list[tuple[str, str]] = [
    ("qwen3_coder", "<tool_call>\n<function=now"),
    ("qwen3_coder", "<tool_call>\n<function=nobody>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function now>\n</function>"),
    ("qwen3_coder", f"<tool_call>\n{ADD}\n</tool_call>"),
    ("glm45", "<tool_call>now and then"),
    ("glm45", "<tool_call>"),
    ("deepseek_v3", f"{BEGINS}{CALL}now{SEP}{{}}"),
    ("deepseek_v31", f"{BEGINS}{ENDS}"),
    ("deepseek_v31", f"{BEGINS}{CALL}nobody{SEP}{{}}{CALL_END}{ENDS}"),
    ("deepseek_v31", f"{BEGINS}{CALL}{'x' * 600}"),
    ("kimi_k2", f"{SECTION}{kimi('functions.now', '{}')}"),
    ("kimi_k2", f"{SECTION}<|tool_call_begin|>functions.now:0"),
    ("granite", "<|tool_call|>[1, 2]"),
    ("phi4_mini_json", "functools are useful"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[nobody()]"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(a=b)]"),
    ("pythonic", "[now(a=])]"),
    ("pythonic", f"[now(a={'[' * 100}{']' * 100})]"),
    ("pythonic", f"[now(a={'9' * 5000})]"),
    ("llama4_pythonic", "<|python_start|>print(1)<|python_end|>"),
    ("olmo3", "<function_calls>\nnobody\n</function_calls>"),
    ("lfm2", "<|tool_call_start|>now()"),
    ("step3", f"<｜tool_calls_begin｜>{step('nobody')}"),
    ("functiongemma", f"{GEMMA}now{{}}"),
    ("functiongemma", f"{GEMMA}call:nobody{{}}"),
    ("gigachat3", "function call<|role_sep|>\nnow"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call> weather"),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("hermes", '<tool_call>{"name": "wea'),
    ("hermes", "<tool_call>{name: now}</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"\\ud800": {"a": [}}</tool_call>'),
    ("hermes", "a < b <tool_cal> c <tool"),
    ("hermes", '<tool_call>[{"name": "now"}]</tool_call>'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]nobody[ARGS]{}"),
    ("json", "[" * 3000),
    ("json", '{"a":' * 3000),
]


# Texts out of the signs that the styles are made of, so that every state meets every sign.
SIGNS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", WEATHER, ADD]
SIGNS += ['{"name": "now"', '"name"', '"arguments": ', "{", "}", "[", "]", ",", ";", ":", '"']
SIGNS += ["<function=now>", "</function>", "<parameter=city>", "</parameter>", "<seed:tool_call>"]
SIGNS += [
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "</seed:tool_call>",
    "functools",
]
SIGNS += ['<invoke name="add">', "</invoke>", '<parameter name="x">', "</minimax:tool_call>"]
SIGNS += ["<minimax:tool_call>", BEGINS, CALL, SEP, CALL_END, ENDS, "```json\n", "```", "function"]
SIGNS += [SECTION, SECTION_END, kimi("functions.now:0", "{"), "<|tool_call|>", "now(", ")", "x=1"]
SIGNS += ["<|python_start|>", "<|python_end|>", "'", "<|channel|>", "<|message|>", "<|end|>", START]
SIGNS += ["<function_calls>", "<|tool_call_start|>", "<steptml:invoke", GEMMA, GEMMA_END, ESCAPE]
SIGNS += ["analysis", "final", " to=functions.now", "<|call|>"]
SIGNS += ["\\", " ", "\n", "now", "é", "null", "12", "<", "</", "<think>", "</think>"]
SOUP = st.lists(st.sampled_from(SIGNS), max_size=14).map("".join)
# Of each style, what its states look for.
OWN = {
    "olmo3": ["<function_calls>", "now(", "add(x=", "'", '"', "{}", ")", "\n", "</function_calls>"],
    "lfm2": ["<|tool_call_start|>[", "now(", "add(x=", "'", ")", ", ", "]<|tool_call_end|>"],
    "step3": ["<｜tool_calls_begin｜>", step("add", y="1"), STEP_CALL, "<｜tool_calls_end｜>"],
    "functiongemma": [GEMMA, "call:", "add{", "x:", ESCAPE, "}", ",", "[", "]", "{", GEMMA_END],
    "openai": [START, "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "analysis", "final"],
    "qwen3_coder": [xml("weather", city="a"), "<function=now>", "<parameter=city>", "</parameter>"],
    "glm45": [glm("add", y="1"), "<arg_key>city", "</arg_key>", "<arg_value>", "</arg_value>"],
    "seed_oss": ["<seed:tool_call><function=add>", "<parameter=x>", "</parameter>", "</function>"],
    "minimax_m2": ['<minimax:tool_call><invoke name="add">', '<parameter name="x">', "</invoke>"],
    "deepseek_v32": [
        *(f"{DSML}function_calls>", invoke("add", y=1), f'{DSML}parameter name="', 'x" string="'),
        *('true">', f"{DSML_END}parameter>", f"{DSML_END}invoke>", f"{DSML_END}function_calls>"),
    ],
    "deepseek_v3": [f"{BEGINS}{CALL}function{SEP}now\n", "```json\n", "{}", "```", CALL_END, ENDS],
    "deepseek_v31": [BEGINS, CALL, f"now{SEP}", "{}", CALL_END, ENDS],
    "kimi_k2": [SECTION, "<|tool_call_begin|>", kimi("functions.now:0", "{}"), SECTION_END],
    "pythonic": ["[", "now(", "add(x=", "'", '"', "{}", ")", ", ", "]"],
    "llama4_pythonic": ["<|python_start|>[", "now(", "add(x=", "'", ")", ", ", "]<|python_end|>"],
}


@st.composite
def soup_of(draw: st.DrawFn, style: str) -> str:
    own = OWN.get(style, []) * 2 + list(tool_style(style).signs)
    return "".join(draw(st.lists(st.sampled_from(own) | st.sampled_from(SIGNS), max_size=14)))
