"""The model that ships in the package, and the generator of its corpus."""

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tools.demo_model import corpus, stories
from tools.demo_model.conversation import Conversation, Message, Tool, render, tool_call

DEMO = Path(__file__).parents[3] / "python" / "llmserve" / "demo"
MAX_TOTAL_BYTES = 10_000_000
MOST_PARAMETERS = 4e6
# The same documents as the card's: what is left is the order of float32 sums.
PERPLEXITY_TOLERANCE = 0.01
STORY_SAMPLES = 4

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", name="tokenizer")
def fixture_tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module", name="model")
def fixture_model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        DEMO / "model", dtype=torch.float32
    ).eval()


def test_files_stay_under_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < MAX_TOTAL_BYTES


def test_weights_load_with_transformers_and_are_bf16() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert MOST_PARAMETERS / 2 < model.num_parameters() < MOST_PARAMETERS


def test_tokenizer_round_trips_any_text(tokenizer: Any) -> None:
    text = "Zoë paid 1,234.5 € — “naïve”?\n\n\tdef f(x):  # 日本\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_renders_all_roles_as_the_corpus_does(tokenizer: Any) -> None:
    tool = Tool("get_weather", "Get the weather in a city.", {"city": "string"})
    turns = (
        Message("system", "You are a helpful assistant."),
        Message("user", "What is the weather in Oslo?"),
        Message("assistant", tool_call("get_weather", {"city": "Oslo"})),
        Message("tool", '{"sky": "clear"}'),
        Message("assistant", "It is clear in Oslo."),
    )
    for tools in ((), (tool,)):
        rendered = tokenizer.apply_chat_template(
            [{"role": turn.role, "content": turn.content} for turn in turns],
            tools=[tool.schema() for tool in tools] or None,
            tokenize=False,
        )
        assert rendered == render(Conversation(turns, tools))


def test_chat_template_renders_structured_tool_calls(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tool_call("add", {"a": 1, "b": 2}) + "<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.endswith(expected)


def test_a_tool_call_survives_decoding_without_special_tokens(tokenizer: Any) -> None:
    call = tool_call("add", {"a": 1, "b": 2})
    ids = tokenizer(call + "<|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == call


def test_generator_repeats_itself_for_a_seed() -> None:
    first, again = (list(itertools.islice(corpus.documents(seed=5), 50)) for _ in range(2))
    other = list(itertools.islice(corpus.documents(seed=6), 50))
    assert first == again
    assert first != other


@pytest.mark.parametrize("plot", stories.PLOTS, ids=lambda plot: plot.name)
def test_every_plot_is_told_in_whole_sentences(plot: Any) -> None:
    for seed in range(20):
        text = stories.tell(random.Random(seed), stories.Wish(plot=plot)).text
        assert not re.search(r"[\[\]{}|]|  |\b(a [aeio]|In in)", text), text
        assert text.endswith((".", "!", '"')), text


@pytest.mark.long
def test_story_prompt_gives_sentences_that_end(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    inputs = tokenizer(["Once upon a time"] * STORY_SAMPLES, return_tensors="pt")
    ids = model.generate(**inputs)
    stops = set(model.generation_config.eos_token_id)
    prompt_length = inputs["input_ids"].shape[1]
    ended = [row for row in ids[:, prompt_length:].tolist() if stops & set(row)]
    # A sampled story may run past 256 tokens now and then; more than one in four may not.
    assert len(ended) >= STORY_SAMPLES - 1
    for row in ended:
        text = tokenizer.decode(row, skip_special_tokens=True)
        assert text.endswith((".", "!", '"')), text


@pytest.mark.long
def test_perplexity_of_the_shipped_weights_is_the_one_of_the_card(
    model: Any, tokenizer: Any
) -> None:
    evaluate = pytest.importorskip("tools.demo_model.evaluate")
    stated = re.search(
        r"held-out perplexity \| ([\d.]+)", (DEMO / "model" / "README.md").read_text()
    )
    assert stated is not None
    windows = evaluate.held_out_windows(tokenizer, evaluate.NUM_HELD_OUT)
    measured = evaluate.perplexity(model, windows)
    assert measured == pytest.approx(float(stated.group(1)), rel=PERPLEXITY_TOLERANCE)
