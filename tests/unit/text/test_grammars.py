"""Compiled grammars: masks beside llguidance's own Python interface, bombs, bounds, the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from llmserve import (
    LLM,
    InternalError,
    InvalidArgument,
    NotSupported,
    QueueFull,
    SamplingParams,
    StructuredOutputsParams,
    _core,
    _core_testing,
    demo_model_path,
)
from llmserve.parsers.registry import reasoning_style
from llmserve.parsers.think_grammar import thinking_first
from llmserve.requests.grammars import Grammars
from llmserve.tokenization.tokenizer import Tokenizer
from offline import generate, tokens

TOKENIZER = Tokenizer.from_directory(Path(demo_model_path()))
assert TOKENIZER is not None
VOCABULARY = TOKENIZER.to_core()
NUM_TOKENS = TOKENIZER.num_tokens
VOCAB_SIZE = NUM_TOKENS + 37  # padded, as models do
END = TOKENIZER.token_id("<|endoftext|>")
assert END is not None

TEXTS = {
    "json": json.dumps(
        {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "names": {"items": {"type": "string"}}},
            "patternProperties": {"^x": {"type": ["number", "null"]}},
        }
    ),
    "regex": r"(\w+ ){2,4}[^a-z]*é?",
    "grammar": 'start: item+\nitem: "<" NAME ">" start? "</" NAME ">"\nNAME: /[a-z]{1,4}/\n',
}


def make(**limits: float) -> Grammars:
    return Grammars(VOCABULARY, VOCAB_SIZE, [END], _core.GrammarLimits(**limits))  # type: ignore[arg-type,list-item]


def compile_one(grammars: Grammars, field: str, text: str) -> _core.TokenGrammar:
    return grammars.compile(StructuredOutputsParams(**{field: text}))  # type: ignore[arg-type]


class Wrapper:
    """Our vocabulary as llguidance's Python interface takes it."""

    is_tokenizer_wrapper = True
    eos_token_id = END
    bos_token_id = None
    special_token_ids = TOKENIZER.special_token_ids
    tokens = [  # noqa: RUF012
        (b"\xff" if VOCABULARY.is_special(i) else b"") + VOCABULARY.bytes(i)
        for i in range(VOCAB_SIZE)
    ]

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("nothing asks for a tokenization")


@pytest.mark.parametrize("field", TEXTS)
def test_masks_are_those_of_llguidances_python_interface(field: str) -> None:
    params = StructuredOutputsParams(**{field: TEXTS[field]})  # type: ignore[arg-type]
    source = params.source()
    ours = _core_testing.TokenMatcher(make().compile(params))
    # Theirs would force the tokenizer's own spelling of literal text, which ours never asks for.
    start = {"json_schema": "start: %json ", "regex": "start: /", "lark": ""}[source.kind]
    end = "/" if source.kind == "regex" else ""
    text = '%llguidance {"no_forcing": true}\n' + start + source.text + end
    theirs = llguidance.LLMatcher(
        llguidance.LLTokenizer(Wrapper(), n_vocab=VOCAB_SIZE),
        llguidance.LLMatcher.grammar_from_lark(text),
    )
    assert not theirs.get_error()
    rng = random.Random(5)
    for _ in range(60):
        mask = ours.mask(VOCAB_SIZE)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        expected = np.frombuffer(theirs.compute_bitmask(), np.uint32)
        np.testing.assert_array_equal(mask, expected[: len(mask)])
        others = [int(i) for i in allowed if i != END]
        if not others:
            break
        token_id = rng.choice(others)
        ours.append(token_id)
        assert theirs.consume_token(token_id)


@pytest.mark.parametrize(
    ("is_open", "text", "is_whole"),
    [
        (True, "Hm, <b> or </th>?\n</think>\n\nyes", True),
        (True, "</think>no", True),
        (True, "yes", False),  # a thought
        (False, "<think>Hm.</think>\nno", True),
        (False, "yes", True),
        (False, "<think>yes", False),
    ],
)
def test_an_answer_may_follow_a_thought(is_open: bool, text: str, is_whole: bool) -> None:
    source = StructuredOutputsParams(choice=["yes", "no"]).source()
    lark = thinking_first(source, reasoning_style("think"), is_open, lambda _: None)
    matcher = _core_testing.TokenMatcher(compile_one(make(), "grammar", lark))
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        matcher.append(token_id)
    mask = matcher.mask(VOCAB_SIZE)
    assert bool(mask[END // 32] >> (END % 32) & 1) == is_whole


@pytest.mark.parametrize("field", TEXTS)
def test_a_mask_has_the_tokens_that_the_grammar_takes_and_no_others(field: str) -> None:
    grammar = compile_one(make(), field, TEXTS[field])
    rng = random.Random(9)
    path: list[int] = []
    for _ in range(6):
        follow = _core_testing.TokenMatcher(grammar)
        for token_id in path:
            follow.append(token_id)
        bits = np.unpackbits(follow.mask(VOCAB_SIZE).view(np.uint8), bitorder="little")
        allowed = set(np.flatnonzero(bits).tolist())
        assert not any(VOCABULARY.is_special(i) for i in allowed - {END})
        assert all(i < NUM_TOKENS for i in allowed)
        for token_id in [*rng.sample(range(NUM_TOKENS), 40), *list(allowed)[:10]]:
            other = _core_testing.TokenMatcher(grammar)
            for earlier in path:
                other.append(earlier)
            if token_id in allowed:
                other.append(token_id)
            else:
                with pytest.raises(InvalidArgument, match="grammar cannot be followed"):
                    other.append(token_id)
        path.append(rng.choice(sorted(allowed - {END})))


def test_a_cancelled_matcher_gives_no_mask_and_leaves_its_siblings_alone() -> None:
    grammar = compile_one(make(), "regex", "[a-z]+")
    first, second = _core_testing.TokenMatcher(grammar), _core_testing.TokenMatcher(grammar)
    first.cancel()
    with pytest.raises(InvalidArgument, match="cancelled"):
        first.mask(VOCAB_SIZE)
    assert second.mask(VOCAB_SIZE).any()


def random_grammar(rng: random.Random) -> StructuredOutputsParams:
    """A regular expression, a schema or a Lark grammar of random parts."""
    words = ["".join(rng.choices("abcdef", k=rng.randint(1, 5))) for _ in range(4)]
    kind = rng.choice(["regex", "json", "grammar"])
    if kind == "regex":
        parts = [*words, "[a-z]+", "[0-9]{2,5}", "(x|yz)*", r"\w{1,9}", "( [a-z]+)?"]
        return StructuredOutputsParams(regex="".join(rng.choices(parts, k=rng.randint(2, 6))))
    if kind == "json":
        leaves = [{"type": "integer"}, {"type": "string"}, {"enum": words}, {"type": "boolean"}]
        arrays = [{"type": "array", "items": leaf} for leaf in leaves]
        properties = {word: rng.choice([*leaves, *arrays]) for word in words}
        schema = {"type": "object", "properties": properties, "required": [words[0]]}
        return StructuredOutputsParams(json=json.dumps(schema))
    inner = rng.choice(['"<" start? ">"', '"(" start "," start ")"', f'start? "{words[0]}"'])
    return StructuredOutputsParams(
        grammar=f"start: item{rng.choice('+*')}\nitem: {inner} | NAME\nNAME: /[a-z]{{1,4}}/\n"
    )


def allowed_by(matcher: _core_testing.TokenMatcher) -> list[int]:
    bits = np.unpackbits(matcher.mask(VOCAB_SIZE).view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


@pytest.mark.parametrize("seed", range(25))
def test_what_is_rolled_back_leaves_no_trace(seed: int) -> None:
    """Drafts are appended, some end the text, and taken back one by one or all at once; a matcher
    that never saw them has the same masks."""
    rng = random.Random(seed)
    grammar = make().compile(random_grammar(rng))
    drafted, plain = _core_testing.TokenMatcher(grammar), _core_testing.TokenMatcher(grammar)
    path: list[int] = []
    for _ in range(12):
        num_drafts = 0
        for _ in range(rng.randint(0, 5)):
            allowed = allowed_by(drafted)
            if END in allowed and rng.random() < 0.3:
                drafted.append(END)
                num_drafts += 1
                break
            others = [i for i in allowed if i != END]
            if not others:
                break
            drafted.append(rng.choice(others))
            num_drafts += 1
        while num_drafts > 0:
            count = rng.randint(1, num_drafts)
            drafted.roll_back(count)
            num_drafts -= count
        expected = allowed_by(plain)
        assert allowed_by(drafted) == expected
        others = [i for i in expected if i != END]
        if not others:
            break
        path.append(rng.choice(others))
        drafted.append(path[-1])
        plain.append(path[-1])
    drafted.roll_back(len(path))
    assert allowed_by(drafted) == allowed_by(_core_testing.TokenMatcher(grammar))


@pytest.mark.parametrize("seed", range(8))
def test_a_clone_goes_its_own_way(seed: int) -> None:
    rng = random.Random(100 + seed)
    grammar = make().compile(random_grammar(rng))
    matcher = _core_testing.TokenMatcher(grammar)
    matcher.append(rng.choice([i for i in allowed_by(matcher) if i != END]))
    before = allowed_by(matcher)
    clone = matcher.clone()
    assert allowed_by(clone) == before
    others = [i for i in before if i != END]
    if others:
        clone.append(rng.choice(others))
        assert allowed_by(matcher) == before
        clone.roll_back(1)
    clone.roll_back(1)  # what was appended before it was cloned
    assert allowed_by(clone) == allowed_by(_core_testing.TokenMatcher(grammar))
    clone.cancel()
    with pytest.raises(InvalidArgument, match="cancelled"):
        clone.mask(VOCAB_SIZE)
    assert allowed_by(matcher) == before


def test_a_text_that_ended_goes_on_after_its_end_is_rolled_back() -> None:
    matcher = _core_testing.TokenMatcher(compile_one(make(), "regex", "[a-z]{0,3}"))
    before = allowed_by(matcher)
    assert END in before
    matcher.append(END)
    matcher.roll_back(1)
    assert allowed_by(matcher) == before
    while others := [i for i in allowed_by(matcher) if i != END]:
        matcher.append(others[0])
    for _ in range(3):  # nothing else can come
        assert allowed_by(matcher) == [END]
        matcher.append(END)
    matcher.roll_back(2)
    assert allowed_by(matcher) == [END]
    matcher.roll_back(2)
    assert allowed_by(matcher) != [END]


def test_more_than_was_appended_is_not_rolled_back() -> None:
    matcher = _core_testing.TokenMatcher(compile_one(make(), "regex", "[a-z]+"))
    matcher.append(next(i for i in allowed_by(matcher) if i != END))
    before = allowed_by(matcher)
    for count in (2, -1):
        with pytest.raises(InternalError, match="taken back"):
            matcher.roll_back(count)
    assert allowed_by(matcher) == before
    matcher.roll_back(1)
    with pytest.raises(InternalError, match="taken back"):
        matcher.roll_back(1)


def nested(open_: str, middle: str, close: str, depth: int) -> str:
    return open_ * depth + middle + close * depth


def referring(depth: int) -> dict[str, object]:
    """Each definition names the next one twice."""
    definitions: dict[str, object] = {f"d{depth}": {"type": "object"}}
    for i in range(depth):
        twice = [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]
        definitions[f"d{i}"] = {"allOf": twice}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


ALTERNATIVES = [
    {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(8)]}
    for i in range(12)
]
DOUBLING = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(50)) + '\nr50: "a"\nstart: r0'
SELECTED = " & ".join(f"/.*{c}.*/" for c in "abcdefghijklmnopqrstuvwxyz")
BOMBS: dict[str, dict[str, object]] = {
    "a huge repetition": {"regex": "((a{1000}){1000}){1000}"},
    "an exponential automaton": {"regex": "(a|b)*a(a|b){200}"},
    "deep groups": {"regex": nested("(", "a", ")", 100_000)},
    "deep stars": {"regex": nested("(", "a", "*)", 200)},
    "an intersection": {"grammar": f"start: A\nA: {SELECTED}"},
    "deep parentheses": {"grammar": "start: " + nested("(", '"a"', ")", 100_000)},
    "repeated repetitions": {"grammar": 'start: (("a"{1000}){1000}){1000}'},
    "doubling rules": {"grammar": DOUBLING},
    "ambiguity": {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    "a deep schema": {"json": nested('{"properties":{"a":', "{}", "}}", 100)},
    "doubling references": {"json": referring(40)},
    "a product of alternatives": {"json": {"allOf": ALTERNATIVES}},
    "many items": {"json": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}}},
    "a long string": {"json": {"type": "string", "minLength": 10**6}},
    "many values": {"json": {"enum": [f"value {i}" for i in range(10_000)]}},
    "a large multiple": {"json": {"type": "integer", "multipleOf": 200_003}},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(demo_model_path(), num_threads=1, num_gpu_blocks_override=256)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_within_its_limit_and_its_neighbour_does_not_notice(
    llm: LLM, name: str
) -> None:
    grammars = Grammars(
        llm.get_tokenizer().to_core(),
        llm.get_tokenizer().num_tokens,
        [END],  # type: ignore[list-item]
        _core.GrammarLimits(timeout_s=1.0),
    )
    llm._admission = dataclasses.replace(llm._admission, grammars=grammars)
    plain = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True)
    expected = tokens(generate(llm, "Once upon a time", plain))
    bomb = SamplingParams(
        structured_outputs=StructuredOutputsParams(**BOMBS[name]),  # type: ignore[arg-type]
        max_tokens=16,
        seed=2,
    )
    start = time.monotonic()
    message = "sampling_params[1]: structured_outputs: "
    try:
        neighbour, output = generate(llm, ["Once upon a time", "The"], [plain, bomb])
        assert tokens([neighbour]) == expected
        (sample,) = output.outputs
        assert sample.finish_reason in ("stop", "length", "error")
        assert (sample.error is not None) == (sample.finish_reason == "error")
    except InvalidArgument as error:
        message = str(error)
    assert message.startswith("sampling_params[1]: structured_outputs: ")
    assert time.monotonic() - start < 30  # 1 s to compile, 2 s a mask; the rest is the machine's
    assert tokens(generate(llm, "Once upon a time", plain)) == expected


class StuckGrammars(Grammars):
    """The regular expression "stuck" has masks that never come."""

    def compile(self, params: StructuredOutputsParams) -> _core.TokenGrammar:
        if params.regex == "stuck":
            return _core_testing.StuckGrammar()  # type: ignore[no-any-return]
        return super().compile(params)


def test_a_mask_that_does_not_come_fails_its_request_alone(llm: LLM) -> None:
    end = [END]
    stuck = StuckGrammars(llm.get_tokenizer().to_core(), llm.get_tokenizer().num_tokens, end)  # type: ignore[arg-type]
    llm._admission = dataclasses.replace(llm._admission, grammars=stuck)
    prompts = ["Once upon a time"] * 3
    plain = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
    fields = [StructuredOutputsParams(regex=text) for text in ("[a-z ]{30}", "stuck")]
    constrained, late = (dataclasses.replace(plain, structured_outputs=f) for f in fields)
    expected = tokens(generate(llm, prompts[:2], [plain, constrained]))
    outputs = generate(llm, prompts, [plain, late, constrained])
    assert tokens([outputs[0], outputs[2]]) == expected
    (sample,) = outputs[1].outputs
    assert (sample.finish_reason, sample.token_ids) == ("error", [])
    assert "took more than 2 s" in (sample.error or "")


class SlowGrammars(Grammars):
    """Each mask of a regular expression comes after a while."""

    delay_s = 0.0

    def compile(self, params: StructuredOutputsParams) -> _core.TokenGrammar:
        grammar = super().compile(params)
        if params.regex is None or self.delay_s == 0:
            return grammar
        return _core_testing.SlowGrammar(grammar, self.delay_s)  # type: ignore[no-any-return]


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt_logprobs": 1}], ids=str)
def test_a_late_mask_holds_up_its_own_sequence_and_changes_no_token(
    fields: dict[str, Any], llm: LLM
) -> None:
    """Four slow grammars beside plain and constrained requests, on blocks of which some fill."""
    slow = SlowGrammars(llm.get_tokenizer().to_core(), llm.get_tokenizer().num_tokens, [END])  # type: ignore[list-item]
    llm._admission = dataclasses.replace(llm._admission, grammars=slow)
    plain = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
    quick = dataclasses.replace(plain, structured_outputs=StructuredOutputsParams(choice=["ab"]))
    regex = StructuredOutputsParams(regex="[a-z ]{80}")
    late = dataclasses.replace(plain, max_tokens=5, structured_outputs=regex, **fields)
    prompts = ["Once upon a time"] * 2 + ["The fox " * n for n in (1, 2, 3, 7)]
    params = [plain, quick, *[late] * 4]
    expected = generate(llm, prompts, params)
    slow.delay_s = 0.03
    outputs = generate(llm, prompts, params)
    for output, right in zip(outputs, expected, strict=True):
        assert [s.error for s in output.outputs] == [None] * len(output.outputs)
        assert [s.token_ids for s in output.outputs] == [s.token_ids for s in right.outputs]
        assert output.prompt_logprobs == right.prompt_logprobs
    # Steps went on without them.
    late_ids = {int(output.request_id) for output in outputs[2:]}
    waits = [
        decision
        for step in llm.trace()
        for decision in step.decisions
        if decision.request_id in late_ids and decision.kind == "waits_for_grammar"
    ]
    assert waits
    assert llm.get_metrics().num_blocks_used == 0


def test_a_late_mask_is_waited_for_where_nothing_else_runs(llm: LLM) -> None:
    """And its budget is for all masks of a request."""
    slow = SlowGrammars(llm.get_tokenizer().to_core(), llm.get_tokenizer().num_tokens, [END])  # type: ignore[list-item]
    llm._admission = dataclasses.replace(llm._admission, grammars=slow)
    slow.delay_s = 0.7
    params = SamplingParams(
        max_tokens=20,
        temperature=0.0,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{40}"),
    )
    (output,) = generate(llm, ["The"], params)
    (sample,) = output.outputs
    assert sample.finish_reason == "error"
    assert 1 <= len(sample.token_ids) <= 2
    assert "took more than 2 s" in (sample.error or "")


def test_an_abort_does_not_wait_for_a_late_mask(llm: LLM) -> None:
    slow = SlowGrammars(llm.get_tokenizer().to_core(), llm.get_tokenizer().num_tokens, [END])  # type: ignore[list-item]
    llm._admission = dataclasses.replace(llm._admission, grammars=slow)
    slow.delay_s = 1.5
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]{40}"))
    (name,) = llm.enqueue(["The"], params)
    deadline = time.monotonic() + 60
    while llm.get_metrics().num_requests_running == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    llm.abort(name)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].finish_reason == "abort"
    llm.sleep()  # refused while anything runs, and a matcher left over is an error
    llm.wake_up()


def test_a_compile_that_was_given_up_keeps_no_thread_from_others() -> None:
    grammars = make(timeout_s=0.3, max_num_threads=1, max_num_given_up=2)
    for multiple in (400_009, 500_009):  # seconds each
        with pytest.raises(InvalidArgument, match=r"json took more than 0\.3 s to compile"):
            compile_one(grammars, "json", json.dumps({"type": "integer", "multipleOf": multiple}))
    found = None
    deadline = time.monotonic() + 60
    while found is None and time.monotonic() < deadline:  # a loaded machine takes its time
        with contextlib.suppress(InvalidArgument):
            found = compile_one(grammars, "regex", "a")
    assert found is not None
    assert grammars._compiler is not None
    assert grammars._compiler.num_compiled == 1


def test_what_takes_too_long_is_refused_and_the_threads_stay_bounded() -> None:
    grammars = make(timeout_s=0.05, max_num_threads=1, max_num_given_up=0)
    slow = {"type": "integer", "multipleOf": 50_021}
    with pytest.raises(InvalidArgument, match=r"json took more than 0\.05 s to compile"):
        compile_one(grammars, "json", json.dumps(slow))
    # Its thread is still at it.
    with pytest.raises(QueueFull, match=r"regex waited 0\.05 s for other grammars"):
        compile_one(grammars, "regex", "a")
    found = None
    deadline = time.monotonic() + 180
    while found is None and time.monotonic() < deadline:  # at low priority it takes its time
        with contextlib.suppress(QueueFull, InvalidArgument):
            found = compile_one(grammars, "regex", "a")
    assert found is not None


def test_a_grammar_is_compiled_once_by_whomever_it_is_asked_for() -> None:
    grammars = make()
    found: list[_core.TokenGrammar] = []
    threads = [
        threading.Thread(target=lambda: found.append(compile_one(grammars, "regex", "[a-z]{3}")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    compiler = grammars._compiler
    assert compiler is not None
    assert compiler.num_compiled == 1
    with pytest.raises(InvalidArgument):
        compile_one(grammars, "regex", "(")
    assert compiler.num_compiled == 2


def test_the_cache_forgets_what_was_used_the_longest_time_ago() -> None:
    grammars = make(cache_bytes=3 * (256 << 10) + 128 * 30)  # three, with texts of 10 bytes
    for text in ("a", "b", "c", "a", "d", "a", "c", "d"):  # "d" takes the place of "b"
        compile_one(grammars, "regex", text)
    compiler = grammars._compiler
    assert compiler is not None
    assert compiler.num_compiled == 4
    compile_one(grammars, "regex", "b")
    assert compiler.num_compiled == 5
    assert compiler.cached_bytes <= 3 * (256 << 10) + 128 * 30
    compile_one(grammars, "regex", "x" * 10_000)  # as much as all the cache holds, and more
    assert compiler.cached_bytes == 0


def test_a_model_without_an_end_token_is_refused() -> None:
    grammars = Grammars(VOCABULARY, VOCAB_SIZE, [])
    with pytest.raises(InvalidArgument, match="need a token that ends a text"):
        compile_one(grammars, "regex", "a")
    for beyond in (-1, VOCAB_SIZE):
        grammars = Grammars(VOCABULARY, VOCAB_SIZE, [END, beyond])
        with pytest.raises(InvalidArgument, match=f"the end token id {beyond} is outside"):
            compile_one(grammars, "regex", "a")


def test_a_library_that_is_not_llguidance_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nothing.so"
    for content in (None, b"not a library"):
        if content is not None:
            path.write_bytes(content)
        compiler = _core.GrammarCompiler(str(path), VOCABULARY, VOCAB_SIZE, [END])
        with pytest.raises(NotSupported, match=r"llmserve\[structured\]"):
            compiler.compile("regex", "regex", "a")
