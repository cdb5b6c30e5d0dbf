"""`LLM.chat`: what it makes of messages, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import chat_templates
import pytest
from llmserve import (
    LLM,
    CorruptFile,
    InvalidArgument,
    NotSupported,
    SamplingParams,
    Tokenizer,
    demo_model_path,
)
from offline import GREEDY, tokens

USER = {"role": "user", "content": "the fox"}
ANSWER = {"role": "assistant", "content": "hello"}


def chat(llm: LLM, messages: object, **options: Any) -> Any:
    return llm.chat(messages, GREEDY, False, **options)  # type: ignore[arg-type]


def tokenizer_with(tmp_path: Path, template: object, **config: object) -> Tokenizer:
    shutil.copy(demo_model_path() / "tokenizer.json", tmp_path)
    if template is not None:
        config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer is not None
    return tokenizer


def render(tokenizer: Tokenizer, **options: Any) -> str:
    options.setdefault("messages", [USER])
    return str(tokenizer.apply_chat_template(**options, tokenize=False))


def test_options_of_transformers_are_refused_unless_they_ask_for_nothing() -> None:
    tokenizer = Tokenizer.from_directory(demo_model_path())
    assert tokenizer is not None
    ids = tokenizer.apply_chat_template([USER])
    assert ids == tokenizer.apply_chat_template(
        [USER], return_tensors=None, return_dict=False, padding=False, max_length=None
    )
    for name, value in (("return_tensors", "pt"), ("return_dict", True), ("max_length", 3)):
        with pytest.raises(NotSupported, match=f"apply_chat_template: {name}={value!r} is not"):
            tokenizer.apply_chat_template([USER], **{name: value})


def test_chat_continues_the_prompt_that_the_template_makes(llm: LLM) -> None:
    (output,) = chat(llm, [USER])
    assert output.prompt == "<|user|>the fox</s><|assistant|>"
    ids = llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    assert output.prompt_token_ids == ids
    assert tokens([output]) == tokens(llm.generate(ids, GREEDY, use_tqdm=False))


def test_a_list_of_conversations_gives_an_output_each(llm: LLM) -> None:
    outputs = chat(llm, [[USER], [USER, ANSWER, USER]])
    assert [output.prompt for output in outputs] == [
        "<|user|>the fox</s><|assistant|>",
        "<|user|>the fox</s><|assistant|>hello</s><|user|>the fox</s><|assistant|>",
    ]


def test_each_conversation_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 3)]
    outputs = llm.chat([[USER], [USER]], params, use_tqdm=False)
    assert [len(ids) for ids in tokens(outputs)] == [1, 3]


def test_the_last_message_can_be_continued(llm: LLM) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (output,) = chat(llm, [USER, ANSWER], **options)
    assert output.prompt == "<|user|>the fox</s><|assistant|>hello"


def test_a_template_may_be_given_as_text_as_path_or_by_name(llm: LLM, tmp_path: Path) -> None:
    text = "{{ messages[0].content }}!"
    path = tmp_path / "mine.jinja"
    path.write_text(text)
    for template in (text, path, str(path)):
        (output,) = chat(llm, [USER], chat_template=template)
        assert output.prompt == "the fox!"
    assert chat(llm, [USER], chat_template="default")[0].prompt.startswith("<|user|>")


def test_the_llms_template_stands_in_for_the_models(checkpoint: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    with LLM(checkpoint, chat_template=template, num_gpu_blocks_override=32) as llm:
        (output,) = chat(llm, [USER])
    assert output.prompt == "<s>the fox"
    assert output.prompt_token_ids.count(1) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat_template is not a template: line 1"),
        ("{{ x | nothing }}", "No filter named 'nothing'"),
        ("no such file", "chat_template must be a Jinja template, the path of one"),
        (7, "chat_template must be a Jinja template"),
        ("", "chat_template must be a Jinja template"),
        ("{# " + "x" * 2**18 + " #}", "more than the 262144 allowed"),
        ("{{ a }}" * 11_000, "33000 tokens of Jinja, more than the 32768 allowed"),
    ],
)
def test_a_bad_template_is_refused_when_the_llm_is_made(
    template: Any, message: str, checkpoint: Path
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        LLM(checkpoint, chat_template=template)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hello"}, "messages must be a conversation"),
    ({"messages": ["hello"]}, r"messages\[0\] must be a dict with 'role' and 'content'"),
    ({"messages": [[USER], []]}, r"messages\[1\] must be a list of messages"),
    ({"messages": [[USER], USER]}, r"messages\[1\] must be a list of messages"),
    ({"messages": [{"content": "a"}]}, r"messages\[0\]\['role'\] must be a string"),
    ({"messages": [{"role": "user", "content": 3}]}, "must be text or a list of parts, got 3"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        r"messages\[0\]\['content'\]\[0\] has type 'image_url': llmserve runs the text part",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'text': ..."),
    ({"messages": [{**USER, "x": object()}]}, r"messages\[0\]\['x'\] must be text, a number"),
    ({"messages": [{**USER, "x": {1: 2}}]}, "keys must be strings, got 1"),
    ({"tools": "f"}, "tools must be a list"),
    ({"tools": ["f"]}, r"tools\[0\] must be a JSON schema"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be a dict"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs cannot set 'messages'"),
    ({"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs cannot set 'tokenize'"),
    ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs cannot set 'bos_token'"),
    ({"chat_template_kwargs": {"x": object()}}, r"chat_template_kwargs\['x'\] must be text"),
    ({"continue_final_message": True}, "set one of them to False"),
    ({"add_generation_prompt": 1}, "add_generation_prompt must be True or False"),
    (
        {
            "messages": [USER, {"role": "assistant"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "needs a last message with content",
    ),
    (
        {
            "chat_template": "x{# content #}",
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "cannot be continued",
    ),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "lone surrogate"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CALLS)
def test_a_bad_call_is_refused_by_name(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        chat(llm, **{"messages": [USER], **options})


def test_deep_nesting_is_refused(llm: LLM) -> None:
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(InvalidArgument, match="nested deeper than 64"):
        chat(llm, [USER], tools=[{"x": deep}])


def test_a_template_that_refuses_says_why_and_which_conversation(llm: LLM) -> None:
    template = chat_templates.TEMPLATES["mistral"]
    with pytest.raises(InvalidArgument, match=r"^chat_template refuses .*take turns, got user"):
        chat(llm, [USER, USER], chat_template=template)
    with pytest.raises(InvalidArgument, match=r"^messages\[1\]: chat_template refuses"):
        chat(llm, [[USER], [USER, USER]], chat_template=template)


def test_a_template_that_fails_names_the_line(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=r"fails at line 2: UndefinedError: .*'nothing'"):
        chat(llm, [USER], chat_template="a\n{{ nothing.at.all }}")


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, None)
    with pytest.raises(InvalidArgument, match=r"no chat template .*pass chat_template"):
        render(tokenizer)


NAMED = [
    {"name": "default", "template": "default"},
    {"name": "tool_use", "template": "tools"},
    {"name": "rag", "template": "rag"},
]


def test_tools_pick_the_template_for_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, NAMED)
    assert render(tokenizer) == "default"
    assert render(tokenizer, tools=[TOOL]) == "tools"
    assert render(tokenizer, tools=[TOOL], chat_template="rag") == "rag"


def test_named_templates_without_a_default_have_to_be_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, NAMED[1:])
    with pytest.raises(InvalidArgument, match="pass chat_template as one of rag, tool_use"):
        render(tokenizer)
    assert render(tokenizer, tools=[TOOL]) == "tools"


def test_template_files_come_before_the_configured_ones(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("other file")
    tokenizer = tokenizer_with(tmp_path, NAMED)
    assert render(tokenizer) == "file"
    assert render(tokenizer, chat_template="rag") == "other file"
    assert render(tokenizer, tools=[TOOL]) == "file"


def test_a_template_file_that_links_out_of_the_folder_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    model = tmp_path / "model"
    model.mkdir()
    (model / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptFile, match="outside the checkpoint directory"):
        tokenizer_with(model, None)


@pytest.mark.parametrize("template", [7, [7], [{"name": "x"}], {"a": "b"}])
def test_a_broken_configuration_is_named(template: object, tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"tokenizer_config.json: chat_template must be"):
        tokenizer_with(tmp_path, template)


def test_special_tokens_reach_the_template_in_both_spellings(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "<u>", "sep_token": 3}')
    eos = {"content": "</s>", "lstrip": False}
    tokenizer = tokenizer_with(
        tmp_path, "{{ bos_token }}{{ eos_token }}{{ unk_token }}", bos_token="<s>", eos_token=eos
    )
    assert render(tokenizer) == "<s></s><u>"


def test_variables_reach_the_template(llm: LLM) -> None:
    template = "{{ enable_thinking }} {{ documents[0].title }}"
    (output,) = chat(
        llm,
        [USER],
        chat_template=template,
        chat_template_kwargs={"enable_thinking": False, "documents": [{"title": "t"}]},
    )
    assert output.prompt == "False t"


def test_a_conversation_is_not_changed(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}, ANSWER]
    before = json.dumps(messages)
    chat(llm, messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before
