"""What the engine answers, recorded before a change and compared after it, bit for bit.

    PYTHONPATH=python:tests python tests/golden/outputs.py record FILE [--only PATTERN]
    PYTHONPATH=python:tests python tests/golden/outputs.py compare FILE

For a change that may change no token. The file has tokens, log-probabilities and texts of every
architecture, dtype, format of weights, sampling parameter and kind of request, each with a digest.
It depends on the machine's instruction set, which its head names, so that none is in the
repository. Only the public API is called: the tree before a change and the one after it run the
same script. It is one file, longer than others may be, so that it can be taken to another tree.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import functools
import hashlib
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import llmserve
import numpy as np
import transformers
from checkpoints import FAMILIES, VOCAB_SIZE, WRAPPED, checkpoint, reference_model
from gguf_files import in_format, write_gguf
from llmserve import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CompletionOutput,
    Logprob,
    PoolingParams,
    RepetitionDetectionParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    _core,
    demo_model_path,
)
from parity.test_architectures import SCALINGS
from parity.test_gguf_models import CASES as GGUF_FILES
from parity.test_gguf_models import WIDE as GGUF_WIDE

Case = Callable[[], Any]  # gives what JSON can hold
Rows = Iterable[dict[int, Logprob] | None]

SMALL: dict[str, Any] = {"max_model_len": 112, "num_threads": 1, "num_gpu_blocks_override": 64}
# Whole groups of every quantization, and rows of every GGUF block. Helium's heads are together as
# wide as the model.
WIDE = {"hidden_size": 128, "intermediate_size": 256}
SIZES = {"helium": {**WIDE, "hidden_size": 64, "head_dim": 16}}
QUANTIZATIONS = [name for name, _ in _core.supported_quantizations()]
GGUF_TYPES = [
    name
    for name, _ in _core.supported_quant_formats()
    if name in gguf.GGMLQuantizationType.__members__ and name != "F64"  # no converter writes it
]
DEMO_SIZE: dict[str, Any] = {"max_model_len": 512, "num_gpu_blocks_override": 256}
THINKING = {"reasoning_start_str": "fox", "reasoning_end_str": "the owl"}
LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "gguf", "llguidance")
MAX_SHOWN = 120  # characters of a value that is not the same


def random_prompts(lengths: Iterable[int], num_common: int) -> list[list[int]]:
    """Every other one begins with the same `num_common` tokens."""
    rng = random.Random(17)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(num_common)]
    tails = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    return [tail if idx % 2 else common + tail for idx, tail in enumerate(tails)]


# 1 to 74 tokens: longer than the windows of 20 that some families have, and than a block.
PROMPTS = random_prompts((38, 1, 9, 17, 42), num_common=32)
_DRAWN: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
PARAMS = [
    SamplingParams(temperature=0.0, prompt_logprobs=1, **_DRAWN),
    SamplingParams(temperature=0.8, seed=11, **_DRAWN),
    SamplingParams(temperature=0.9, seed=12, top_k=40, top_p=0.9, min_p=0.01, **_DRAWN),
    SamplingParams(temperature=1.0, **_DRAWN),  # a seed of the LLM's
    SamplingParams(temperature=0.7, seed=14, repetition_penalty=1.2, **_DRAWN),
]


def of_rows(rows: Rows | None) -> Any:
    if rows is None:
        return None
    return [
        None
        if row is None
        else {str(i): [lp.logprob, lp.rank, lp.decoded_token] for i, lp in row.items()}
        for row in rows
    ]


def of_completion(completion: CompletionOutput) -> Any:
    return {
        "token_ids": completion.token_ids,
        "text": completion.text,
        "logprobs": of_rows(completion.logprobs),
        "cumulative_logprob": completion.cumulative_logprob,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        "error": completion.error,
    }


def of_output(output: RequestOutput) -> Any:
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": of_rows(output.prompt_logprobs),
        "outputs": [of_completion(completion) for completion in output.outputs],
    }


def of_outputs(outputs: Iterable[RequestOutput]) -> Any:
    return [of_output(output) for output in outputs]


def of_array(array: Any) -> Any:
    return np.asarray(array).tolist()


def generate(llm: LLM, prompts: Any, params: Any = None, **arguments: Any) -> Any:
    return of_outputs(llm.generate(prompts, params, use_tqdm=False, **arguments))


def batch(path: Path, **options: Any) -> Any:
    """The batch of all prompts, and a hidden state."""
    with LLM(path, **{**SMALL, **options}) as llm:
        (embedding,) = llm.embed(PROMPTS[2], use_tqdm=False)
        return {
            "generate": generate(llm, PROMPTS, PARAMS),
            "embed": of_array(embedding.outputs.data),
            "was_preempted": llm.get_metrics().num_preemptions > 0,
        }


def lazily(family: str, overrides: dict[str, Any], **options: Any) -> Any:
    """`batch` of a checkpoint that is made when the case runs."""
    return batch(checkpoint(family, **overrides), **options)


def models() -> Iterator[tuple[str, Case]]:
    """Every architecture in every dtype and rounded, wrappers, and ways to stretch a context."""
    for family in FAMILIES:
        for dtype in ("float32", "bfloat16"):
            yield f"model/{family}/{dtype}", functools.partial(lazily, family, {}, dtype=dtype)
        yield (
            f"model/{family}/int8",
            functools.partial(lazily, family, SIZES.get(family, WIDE), quantization="int8"),
        )
    for wrapped in WRAPPED:
        yield f"model/{wrapped}", functools.partial(lazily, wrapped, {})
    for name, scaling in SCALINGS.items():
        rope = {"rope_type": name.partition("-")[0], "rope_theta": 10000.0, **scaling}
        overrides = {"rope_parameters": rope}
        yield f"rope/{name}", functools.partial(lazily, "llama", overrides)
    for family in ("llama", "gemma2", "gpt2", "cohere2", "phi"):
        for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}):
            name = "/".join(("ref", family, *options.values()))
            yield name, functools.partial(lazily, family, {}, device="ref", **options)


def gguf_batch(source: Callable[[], Path], kind: str, **options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return batch(write_gguf(Path(folder) / "model.gguf", source(), in_format(kind)), **options)


def formats() -> Iterator[tuple[str, Case]]:
    """Every format of weights and of the KV cache."""
    for family in ("llama", "qwen3", "gemma2", "falcon"):
        own = {"head_dim": 32} if family in ("qwen3", "gemma2") else {}
        for name in QUANTIZATIONS:
            for dtype in ("float32", "bfloat16"):
                options = {"quantization": name, "dtype": dtype}
                yield (
                    f"quantization/{name}/{family}/{dtype}",
                    functools.partial(lazily, family, {**WIDE, **own}, **options),
                )
        for kept in ("float32", "bfloat16", "fp8"):
            for dtype in ("float32", "bfloat16"):
                yield (
                    f"kv_cache/{kept}/{family}/{dtype}",
                    functools.partial(lazily, family, {}, kv_cache_dtype=kept, dtype=dtype),
                )
    for stored in ("bfloat16", "float16"):
        path = functools.partial(checkpoint, "qwen2", dtype=stored)
        yield f"stored/{stored}", lambda path=path: batch(path())
    wide = functools.partial(checkpoint, "llama", **GGUF_WIDE)
    for kind in GGUF_TYPES:
        yield f"gguf/{kind}", functools.partial(gguf_batch, wide, kind)
        yield f"gguf/{kind}/bfloat16", functools.partial(gguf_batch, wide, kind, dtype="bfloat16")
        yield f"gguf/{kind}/none", functools.partial(gguf_batch, wide, kind, quantization="none")
    for name, (family, overrides) in GGUF_FILES.items():
        source = functools.partial(checkpoint, family, **overrides)
        yield f"gguf/{name}", functools.partial(gguf_batch, source, "F32")


def darken(_token_ids: Any, logits: Any) -> None:
    logits[50:] -= 3.0


_DRAW: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, "seed": 21}
# By name: the fields of SamplingParams beside _DRAW.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "negative seed": {"seed": -5},
    "no seed": {"seed": None},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.7},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "repetition_penalty greedy": {"repetition_penalty": 0.8, "temperature": 0.0},
    "logit_bias": {"logit_bias": {11: 2.5, 300: -4.0, 40: 6.0}},
    "allowed_token_ids": {"allowed_token_ids": [*range(3, VOCAB_SIZE, 3)]},
    "bad_words": {"bad_words": ["the", "42", "Th", "the owl"]},
    "stop_token_ids": {"stop_token_ids": [*range(10, 40)]},
    "min_tokens": {"stop_token_ids": [*range(10, 100)], "min_tokens": 7},
    "model's end": {"ignore_eos": False, "logit_bias": {2: 5.0}, "min_tokens": 3},
    "stop": {"stop": ["e", "ow", "!"]},
    "include_stop_str_in_output": {"stop": ["e", "ow", "!"], "include_stop_str_in_output": True},
    "max_tokens of the context": {"max_tokens": None},
    "n": {"n": 3},
    "n greedy": {"n": 2, "temperature": 0.0},
    "no logprobs": {"logprobs": None},
    "logprobs": {"logprobs": 5},
    "logprobs of all": {"logprobs": -1, "max_tokens": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "logprob_token_ids": {"logprob_token_ids": [9, 4, 210]},
    "detokenize": {"detokenize": False},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {1: 6.0}},
    "spaces_between_special_tokens": {"spaces_between_special_tokens": False},
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "thinking_token_budget": {"thinking_token_budget": 3, "logit_bias": {263: 8.0, 91: 8.0}},
    "repetition_detection": {
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=2),
        "allowed_token_ids": [40, 50, 60],
    },
    "logits_processors": {"logits_processors": [darken]},
    "together": {
        **{"temperature": 0.9, "top_k": 60, "top_p": 0.95, "min_p": 0.002, "n": 2},
        **{"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        **{"logit_bias": {7: 1.0, 8: -1.0}, "bad_words": ["fox"], "stop": ["qq"], "logprobs": 3},
        **{"min_tokens": 5, "stop_token_ids": [33], "logits_processors": [darken]},
    },
}


def sampling(name: str, dtype: str) -> Any:
    params = SamplingParams(**{**_DRAW, **SAMPLING[name]})
    with LLM(checkpoint("llama"), dtype=dtype, reasoning_config=THINKING, max_logprobs=-1) as llm:
        start = llm.get_tokenizer().encode("fox", add_special_tokens=False)
        return generate(llm, [*PROMPTS[:3], PROMPTS[1] + start], params)


def all_sampling_in_one_batch(dtype: str, **options: Any) -> Any:
    params = [SamplingParams(**{**_DRAW, **fields}) for fields in SAMPLING.values()]
    prompts = [PROMPTS[idx % len(PROMPTS)] for idx in range(len(params))]
    arguments = {"reasoning_config": THINKING, "max_logprobs": -1, "max_num_seqs": 40, **options}
    with LLM(checkpoint("llama"), dtype=dtype, **arguments) as llm:
        return generate(llm, prompts, params)


def samplings() -> Iterator[tuple[str, Case]]:
    for dtype in ("float32", "bfloat16"):
        for name in SAMPLING:
            yield f"sampling/{name}/{dtype}", functools.partial(sampling, name, dtype)
        yield (
            f"sampling/all in one batch/{dtype}",
            functools.partial(all_sampling_in_one_batch, dtype),
        )
    small = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 50}
    yield (
        "sampling/all in one batch/small pool",
        functools.partial(all_sampling_in_one_batch, "float32", **small),
    )


# By name: arguments of LLM.
ENGINE: dict[str, dict[str, Any]] = {
    "block_size 8": {"block_size": 8, "num_gpu_blocks_override": 128},
    "block_size 32": {"block_size": 32},
    "in chunks": {"max_num_batched_tokens": 19, "max_num_seqs": 5},
    "without chunks": {"enable_chunked_prefill": False},
    "without prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 14},
    "two threads": {"num_threads": 2},
    "two at a time": {"max_num_seqs": 2},
    "max_stall_ms": {"max_stall_ms": 1},
    "packed at once": {"defer_packing": False},
    "packed later": {"defer_packing": True},
    "without async_scheduling": {"async_scheduling": False},
    "enforce_eager": {"enforce_eager": True},
    "seed": {"seed": 77},
    "skip_tokenizer_init": {"skip_tokenizer_init": True},
}


def packed_cache() -> Any:
    """The start that writes the file, and the one that maps it."""
    with tempfile.TemporaryDirectory() as folder, environment("XDG_CACHE_HOME", folder):
        return [batch(checkpoint("llama"), packed_cache_bytes=2**30) for _ in range(2)]


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def priorities(policy: str) -> Any:
    with LLM(checkpoint("llama"), **SMALL, scheduling_policy=policy, max_num_seqs=2) as llm:
        given = [3, 1, 2, -1, 0] if policy == "priority" else None
        return generate(llm, PROMPTS, PARAMS, priority=given)


def prefix_cache() -> Any:
    """One after another, so that what is found does not depend on the time."""
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[0] + PROMPTS[1], PROMPTS[2], PROMPTS[0][:33]]
    with LLM(checkpoint("llama"), **SMALL) as llm:
        outputs = []
        for prompt in prompts:
            (output,) = llm.generate([prompt], PARAMS[2], use_tqdm=False)
            outputs.append({"cached": output.num_cached_tokens, **of_output(output)})
        salted = {"prompt_token_ids": PROMPTS[0], "cache_salt": "a"}
        (output,) = llm.generate(salted, PARAMS[2], use_tqdm=False)
        return [*outputs, {"cached": output.num_cached_tokens, **of_output(output)}]


def sleep() -> Any:
    with LLM(checkpoint("llama"), **SMALL) as llm:
        values = []
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            values.append(generate(llm, PROMPTS, PARAMS))
        return values


def engines() -> Iterator[tuple[str, Case]]:
    for name, options in ENGINE.items():
        yield f"engine/{name}", functools.partial(lazily, "llama", {}, **options)
        yield f"engine/{name}/gemma2", functools.partial(lazily, "gemma2", {}, **options)
    for policy, _ in _core.supported_policies():
        yield f"engine/policy/{policy}", functools.partial(priorities, policy)
    yield "engine/prefix cache", prefix_cache
    yield "engine/sleep", sleep
    yield "engine/packed_cache_bytes", packed_cache


def beams(**options: Any) -> Any:
    values = []
    with LLM(checkpoint("llama"), **{**SMALL, **options}) as llm:
        for params in (
            BeamSearchParams(1, max_tokens=8),
            BeamSearchParams(4, max_tokens=12, length_penalty=0.5),
            BeamSearchParams(3, max_tokens=12, ignore_eos=True, include_stop_str_in_output=True),
        ):
            for output in llm.beam_search(PROMPTS, params):
                values += [
                    [s.tokens, s.cum_logprob, s.text, of_rows(s.logprobs), s.finish_reason]
                    for s in output.sequences
                ]
    return values


def pooling(family: str, dtype: str) -> Any:
    with LLM(checkpoint(family), **SMALL, dtype=dtype) as llm:
        arrays = {
            task: [o.outputs.data for o in llm.encode(PROMPTS, use_tqdm=False, pooling_task=task)]
            for task in ("embed", "token_embed", "token_logits")
        }
        for params in (
            PoolingParams(dimensions=8),
            PoolingParams(use_activation=False),
            PoolingParams(truncate_prompt_tokens=5),
        ):
            outputs = llm.embed(PROMPTS, params, use_tqdm=False)
            arrays[str(params)] = [output.outputs.data for output in outputs]
    return {name: [of_array(array) for array in found] for name, found in arrays.items()}


def prompt_embeds(dtype: str) -> Any:
    import torch

    table = reference_model(checkpoint("llama")).get_input_embeddings().weight.detach()
    prompts = [{"prompt_embeds": table[torch.tensor(prompt)].numpy()} for prompt in PROMPTS]
    with LLM(checkpoint("llama"), **SMALL, dtype=dtype, enable_prompt_embeds=True) as llm:
        return generate(llm, prompts, [params.clone(prompt_logprobs=None) for params in PARAMS])


def from_async_llm() -> Any:
    async def run() -> Any:
        async with AsyncLLM(checkpoint("llama"), **SMALL) as llm:
            return await asyncio.gather(
                *(last(llm, idx, prompt) for idx, prompt in enumerate(PROMPTS))
            )

    async def last(llm: AsyncLLM, idx: int, prompt: list[int]) -> Any:
        async for output in llm.generate(prompt, PARAMS[idx].clone(seed=idx)):
            final = output
        return of_output(final)

    return asyncio.run(run())


def streamed() -> Any:
    with LLM(checkpoint("llama"), **SMALL) as llm:
        *_, final = llm.stream(PROMPTS[0], PARAMS[1])
        ids = llm.enqueue(PROMPTS, PARAMS)
        return [of_output(final), len(ids), of_outputs(llm.wait_for_completion(use_tqdm=False))]


_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
GRAMMARS: list[dict[str, Any]] = [
    {"json": _PERSON},
    {"json": _PERSON, "disable_any_whitespace": True, "disable_additional_properties": True},
    {"json": _PERSON, "whitespace_pattern": " "},
    {"regex": r"(red|green) [a-z]{2,5}: \d+(\.\d\d)?;"},
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'start: "a" num\nnum: /[0-9]{1,4}/'},
    {"json_object": True},
]


def structured(**options: Any) -> Any:
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(**grammar),
            **{"max_tokens": 60, "seed": idx, "n": 2, "logprobs": 1},
        )
        for idx, grammar in enumerate(GRAMMARS)
    ]
    with LLM(demo_model_path(), **{**DEMO_SIZE, **options}) as llm:
        return generate(llm, ["Once upon a time"] * len(params), params)


TEXTS = ["Once upon a time", "The fox", "Zoë asked: “why?”"]
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Tell me a story."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And what is the weather in Paris?"},
    ],
]


def demo(**options: Any) -> Any:
    """Texts, with the model's own default parameters and with others, and conversations."""
    greedy = SamplingParams(temperature=0.0, max_tokens=32, logprobs=1, prompt_logprobs=0)
    drawn = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=32, seed=3, logprobs=2)
    with LLM(demo_model_path(), **{**DEMO_SIZE, **options}) as llm:
        values = [generate(llm, TEXTS, params) for params in (None, greedy, drawn)]
        for arguments in ({}, {"tools": [_TOOL]}):
            outputs = llm.chat(CONVERSATIONS, drawn, use_tqdm=False, **arguments)
            values.append(of_outputs(outputs))
    return values


# By name: arguments of LLM.
DEMO: dict[str, dict[str, Any]] = {
    "as it is": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4-g32": {"quantization": "int4-g32"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "two threads, small pool": {"num_threads": 2, "num_gpu_blocks_override": 64, "block_size": 8},
}


def requests() -> Iterator[tuple[str, Case]]:
    """Every kind of request."""
    for dtype in ("float32", "bfloat16"):
        yield f"request/beams/{dtype}", functools.partial(beams, dtype=dtype)
        for family in ("llama", "gemma3_text", "opt"):
            yield f"request/pooling/{family}/{dtype}", functools.partial(pooling, family, dtype)
        yield f"request/embeds/{dtype}", functools.partial(prompt_embeds, dtype)
    yield "request/beams/small pool", functools.partial(beams, num_gpu_blocks_override=20)
    yield "request/async", from_async_llm
    yield "request/streamed and enqueued", streamed
    for name, options in DEMO.items():
        yield f"request/demo/{name}", functools.partial(demo, **options)
        yield f"request/structured/{name}", functools.partial(structured, **options)


def cases() -> dict[str, Case]:
    """All of them, by name."""
    groups = (models(), formats(), samplings(), engines(), requests())
    return {name: case for group in groups for name, case in group}


def isa() -> str:
    """What models on the CPU run on."""
    with LLM(demo_model_path(), device="cpu", **SMALL) as llm:
        found = re.search(r" on (cpu/\w+)", repr(llm))
    assert found, "LLM's repr names the instruction set"
    return found[1]


def head() -> dict[str, Any]:
    tree = Path(llmserve.__file__).parent
    describe = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"isa": isa(), "commit": commit, "versions": versions}


def text_of(values: Any) -> str:
    """One text for one value: Python writes floats so that they are read back as they were."""
    return json.dumps(values, sort_keys=True)


def digest_of(values: Any) -> str:
    return hashlib.sha256(text_of(values).encode()).hexdigest()


def record(path: Path, only: str = "*") -> int:
    """Writes what the cases give now; returns how many there are."""
    recorded = {}
    for name, case in cases().items():
        if fnmatch.fnmatch(name, only):
            values = case()
            recorded[name] = {"sha256": digest_of(values), "values": values}
    path.write_text(json.dumps({"head": head(), "cases": recorded}, indent=0) + "\n")
    return len(recorded)


def first_difference(before: Any, now: Any, place: str = "") -> str | None:
    """The place of the first value that is not the same, and both values."""
    if text_of(before) == text_of(now):
        return None
    parts: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        parts = ((f"[{key!r}]", before[key], now[key]) for key in before)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = ((f"[{idx}]", *both) for idx, both in enumerate(zip(before, now, strict=True)))
    for part, *both in parts:
        found = first_difference(*both, place + part)
        if found is not None:
            return found
    return f"{place}: {text_of(before)[:MAX_SHOWN]} before, {text_of(now)[:MAX_SHOWN]} now"


def compare(path: Path) -> list[str]:
    """A line for each recorded case that is another now."""
    file = json.loads(path.read_text())
    now, known = head(), cases()
    if now["isa"] != file["head"]["isa"]:
        return [f"recorded on {file['head']['isa']}, and this runs on {now['isa']}"]
    if now["versions"] != file["head"]["versions"]:
        print(f"recorded with {file['head']['versions']}, this is {now['versions']}")
    lines = []
    for name, entry in file["cases"].items():
        if name not in known:
            lines.append(f"{name}: there is no such case now")
            continue
        values = json.loads(text_of(known[name]()))
        if digest_of(values) != entry["sha256"]:
            difference = first_difference(entry["values"], values)
            lines.append(f"{name}{difference}")
            print(lines[-1], flush=True)
    return lines


def main(arguments: list[str] | None = None) -> int:
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="*", help="record the cases whose names match")
    given = parser.parse_args(arguments)
    if given.action == "record":
        print(f"{record(given.file, given.only)} cases recorded in {given.file}")
        return 0
    lines = compare(given.file)
    if lines:
        print(f"{len(lines)} cases differ; the first: {lines[0]}")
        return 1
    print("all recorded cases are the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
