"""Prompts of conversations are those of transformers, for templates of the published styles."""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import chat_templates
import gguf
import pytest
import tokenizer_files
import transformers
from gguf_files import add_bpe
from hypothesis import given, settings
from hypothesis import strategies as st
from llmserve import InvalidArgument, Tokenizer
from llmserve.chat.tool_schema import tool_schema
from transformers.utils import get_json_schema

FAST = settings(deadline=None, derandomize=True, database=None, max_examples=40)
STYLES = sorted(chat_templates.TEMPLATES)


@functools.cache
def directory() -> Path:
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="llmserve-chat-"))
    tokenizer_files.save(tokenizer_files.sentence_piece(), path)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "special": True, "__type": "AddedToken"},
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": [
            {"name": name, "template": template}
            for name, template in chat_templates.TEMPLATES.items()
        ],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


@functools.cache
def tokenizers() -> tuple[Any, Tokenizer]:
    """transformers' and ours, of the same folder."""
    ours = Tokenizer.from_directory(directory())
    assert ours is not None
    return transformers.AutoTokenizer.from_pretrained(directory()), ours


def both(
    style: str, messages: list[dict[str, Any]], **options: Any
) -> tuple[str | None, str | None]:
    """What transformers and llmserve make of a conversation; None where they refuse it."""
    library, ours = tokenizers()
    results: list[str | None] = []
    for tokenizer in (library, ours):
        try:
            text = tokenizer.apply_chat_template(
                messages, chat_template=style, tokenize=False, **options
            )
        except (ValueError, TypeError, transformers.utils.chat_template_utils.jinja2.TemplateError):
            text = None
        results.append(text)
    return results[0], results[1]


OPTIONS = st.fixed_dictionaries(
    {
        "add_generation_prompt": st.booleans(),
        "tools": st.sampled_from([None, [], chat_templates.TOOLS]),
        "documents": st.sampled_from(
            [None, [{"title": "b", "text": "x\ny"}, {"title": "a", "text": "1"}]]
        ),
    },
    optional={"enable_thinking": st.booleans(), "date_string": st.just("1 Jan 2026")},
)


@pytest.mark.parametrize("style", STYLES)
def test_random_conversations_give_the_prompts_of_transformers(style: str) -> None:
    num_rendered = 0

    @FAST
    @given(chat_templates.CONVERSATIONS, OPTIONS)
    def check(messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
        nonlocal num_rendered
        theirs, ours = both(style, messages, **options)
        assert ours == theirs
        num_rendered += ours is not None

    check()
    assert num_rendered > 15


@pytest.mark.parametrize("style", STYLES)
def test_a_continued_message_ends_where_transformers_ends_it(style: str) -> None:
    num_rendered = 0

    @FAST
    @given(chat_templates.alternating())
    def check(messages: list[dict[str, Any]]) -> None:
        nonlocal num_rendered
        theirs, ours = both(style, messages, continue_final_message=True)
        assert ours == theirs
        num_rendered += ours is not None

    check()
    assert num_rendered > 15


@pytest.mark.parametrize("style", STYLES)
def test_prompts_have_the_tokens_of_transformers(style: str) -> None:
    library, ours = tokenizers()
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "hello"}]
    ids = ours.apply_chat_template(messages, chat_template=style)
    theirs = library.apply_chat_template(messages, chat_template=style, return_dict=False)
    assert ids == theirs
    assert ids.count(ours.token_id("<s>")) <= 1  # what the template writes is not written again


@pytest.mark.parametrize("style", STYLES)
def test_a_template_of_its_own_file_gives_the_prompts_of_transformers(
    style: str, tmp_path: Path
) -> None:
    """chat_template.jinja beside the tokenizer, and the same text in a GGUF file's metadata."""
    messages = [{"role": role, "content": f"{role} é"} for role in ("user", "assistant", "user")]
    tokenizer_files.save(tokenizer_files.byte_level(), tmp_path)
    special = {"bos_token": "<|end|>", "eos_token": "<|é|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = chat_templates.TEMPLATES[style]
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_bpe(writer, tokenizer_files.byte_level(), "gpt-2")
    writer.add_bos_token_id(library.bos_token_id)
    writer.add_eos_token_id(library.eos_token_id)
    writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for options in ({}, {"add_generation_prompt": True}):
        expected = library.apply_chat_template(messages, tokenize=False, **options)
        for path in (tmp_path, tmp_path / "model.gguf"):
            ours = Tokenizer.from_path(path)
            assert ours is not None
            assert ours.apply_chat_template(messages, tokenize=False, **options) == expected


def test_text_parts_reach_a_template_that_knows_them() -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    theirs, ours = both("gemma", [{"role": "user", "content": parts}])
    assert ours == theirs == "<s><start_of_turn>user\nthefox<end_of_turn>\n"


def test_text_parts_are_joined_for_a_template_that_does_not() -> None:
    _, tokenizer = tokenizers()
    parts = [{"type": "text", "text": "the"}, "fox"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], chat_template="chatml", tokenize=False
    )
    assert text == "<|im_start|>user\nthe\nfox<|im_end|>\n"


# As LLaVA and SmolVLM have theirs: content is parts, and text is nothing.
_PARTS_ALONE = (
    "{% for message in messages %}{{ message['role'] | upper }}:"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %} <image>"
    "{% endfor %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
    " {{ part['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def test_text_becomes_a_part_for_a_template_that_knows_nothing_else() -> None:
    library, tokenizer = tokenizers()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "runs"},
        {"role": "user", "content": [{"type": "text", "text": "where"}, "to"]},
    ]
    text = tokenizer.apply_chat_template(
        messages, chat_template=_PARTS_ALONE, add_generation_prompt=True, tokenize=False
    )
    assert text == ("SYSTEM: Be brief.\nUSER: the fox\nASSISTANT: runs\nUSER: where to\nASSISTANT:")
    in_parts = [*map(_as_parts, messages[:3])]
    theirs = library.apply_chat_template(in_parts, chat_template=_PARTS_ALONE, tokenize=False)
    options = {"chat_template": _PARTS_ALONE, "tokenize": False}
    assert tokenizer.apply_chat_template(messages[:3], **options) == theirs
    continued = tokenizer.apply_chat_template(messages[:3], continue_final_message=True, **options)
    assert continued == "SYSTEM: Be brief.\nUSER: the fox\nASSISTANT: runs"


def test_text_becomes_a_part_where_the_template_refuses_text() -> None:
    _, tokenizer = tokenizers()
    strict = "{% if messages[0]['content'] is string %}{{ raise_exception('parts') }}{% endif %}"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "fox"}], chat_template=strict + _PARTS_ALONE, tokenize=False
    )
    assert text == "USER: fox\n"


def test_the_template_of_a_processor_comes_before_that_of_its_tokenizer(tmp_path: Path) -> None:
    tokenizer_files.save(tokenizer_files.sentence_piece(), tmp_path)
    config = json.dumps({"chat_template": "tokenizer"})
    (tmp_path / "tokenizer_config.json").write_text(config, encoding="utf-8")

    def rendered() -> str:
        ours = Tokenizer.from_path(tmp_path)
        assert ours is not None
        return ours.apply_chat_template([{"role": "user", "content": "fox"}], tokenize=False)

    assert rendered() == "tokenizer"
    legacy = tmp_path / "chat_template.json"
    legacy.write_text(json.dumps({"chat_template": _PARTS_ALONE}), encoding="utf-8")
    assert rendered() == "USER: fox\n"
    (tmp_path / "chat_template.jinja").write_text("jinja", encoding="utf-8")
    assert rendered() == "jinja"


def test_arguments_as_json_text_become_objects_where_the_template_prints_json() -> None:
    _, tokenizer = tokenizers()
    texts = []
    for arguments in ('{"city": "Oslo"}', {"city": "Oslo"}):
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        for style in ("llama3", "qwen3"):
            texts.append(
                tokenizer.apply_chat_template(messages, chat_template=style, tokenize=False)
            )
    assert texts[:2] == texts[2:]


class Unit(enum.Enum):
    CELSIUS = "c"
    KELVIN = "k"


def simple(city: str, days: int = 1) -> str:
    """Looks at the weather.

    In two paragraphs.

    Args:
        city: The city, which may
            take two lines: really
        days: How many.

    Returns:
        What it is like.
    """
    return f"{city}{days}"


def rich(
    a: list[int],
    b: dict[str, float],
    c: int | None,
    d: str | int | list[str],
    e: Literal["x", 1],
    f: tuple[int, str],
    g: Any,
    h: bool | int = True,
    i: str = "",
) -> list[str]:
    """Takes everything.

    Args:
        a: A.
        b: B.
        c: C.
        d: D.
        e: E.
        f: F.
        g: G.
        h: H.
        i: Tea or coffee (choices: ["tea", "coffee "])
    """
    return [str(x) for x in (a, b, c, d, e, f, g, h, i)]


def newer(unit: Unit) -> Path:
    """Takes an enumeration.

    Args:
        unit: The unit.
    """
    return Path(unit.value)


def nothing() -> None:
    """Does nothing."""


class Methods:
    def method(self, x: float) -> float:
        """A method.

        Args:
            x: A number.

        Raises:
            ValueError: never
        """
        return x


@pytest.mark.parametrize("function", [simple, rich, nothing, Methods().method])
def test_functions_have_the_schemas_that_transformers_gives_them(
    function: Callable[..., object],
) -> None:
    assert tool_schema("tools[0]", function) == get_json_schema(function)


def test_an_enumeration_is_its_values_and_a_result_without_a_schema_is_left_out() -> None:
    # As transformers 5.23 has it, which Python 3.10 does not have; 5.20 has neither.
    assert tool_schema("tools[0]", newer) == {
        "type": "function",
        "function": {
            "name": "newer",
            "description": "Takes an enumeration.",
            "parameters": {
                "type": "object",
                "properties": {
                    "unit": {"type": "string", "enum": ["c", "k"], "description": "The unit."}
                },
                "required": ["unit"],
            },
        },
    }


def test_a_function_is_a_tool() -> None:
    theirs, ours = both("qwen3", [{"role": "user", "content": "a"}], tools=[simple, rich])
    assert ours == theirs
    assert '"name": "simple"' in (ours or "")


def no_docstring(x: int) -> int:
    return x


def no_hint(x) -> int:  # type: ignore[no-untyped-def]
    """Has none.

    Args:
        x: X.
    """
    return int(x)


def no_line(x: int) -> int:
    """Does not say what x is."""
    return x


def odd_hint(x: Path) -> int:
    """Takes a path.

    Args:
        x: X.
    """
    return len(str(x))


BAD_FUNCTIONS = [
    (no_docstring, "has no docstring"),
    (no_hint, "argument x has no type hint"),
    (no_line, "no line for argument x"),
    (odd_hint, "argument x: type hint .*Path.* has no JSON schema"),
    (print, "must be a JSON schema"),
    ("weather", "must be a JSON schema"),
]


@pytest.mark.parametrize(("tool", "message"), BAD_FUNCTIONS)
def test_a_tool_that_cannot_be_described_is_refused(tool: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tool_schema("tools[0]", tool)
