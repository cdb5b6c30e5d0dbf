"""`LLM` from prompts to outputs, on tiny checkpoints and the demo model."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import tokenizer_files
import tokenizers
from llmserve import (
    LLM,
    Array,
    AsyncLLM,
    BeamSearchParams,
    InvalidArgument,
    NotSupported,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    demo_model_path,
)
from llmserve.errors import CorruptFile, ResourceExhausted
from offline import GREEDY, LONG, generate, tokens

# Between the clock that never goes back and the machine's, which is set now and then.
CLOCK_DRIFT_S = 1.0


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[7 + i, 9, 11 + i] for i in range(12)]
    lengths = [12 - i for i in range(12)]
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in lengths]
    outputs = generate(llm, prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(ids) for ids in tokens(outputs)] == lengths
    assert [tokens(generate(llm, p, q))[0] for p, q in zip(prompts, params, strict=True)] == tokens(
        outputs
    )


def test_what_may_generate_most_is_given_to_the_engine_first(llm: LLM) -> None:
    limits = [3, 8, 3, None, 8]
    params = [SamplingParams(max_tokens=n, temperature=0.0) for n in limits]
    outputs = generate(llm, [[7, 9, 11 + i] for i in range(5)], params)
    by_age = sorted(range(5), key=lambda idx: int(outputs[idx].request_id))
    assert by_age == [3, 1, 4, 0, 2]


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    text = "the quick fox"
    ids = llm.get_tokenizer().encode(text)
    forms = [
        text,
        ids,
        tuple(ids),
        np.array(ids),
        np.array(ids, np.int32),
        np.array([ids], np.uint16),
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids), "prompt": "shown"},
        [text],
        [ids],
        [np.int64(i) for i in ids],
    ]
    results = [generate(llm, form)[0] for form in forms]
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    assert [r.prompt for r in results[:2]] == [text, None]
    assert results[8].prompt == "shown"
    assert all(r.prompt_token_ids == ids for r in results)


def test_prompts_may_be_tensors_of_any_integer(llm: LLM) -> None:
    torch = pytest.importorskip("torch")
    ids = llm.get_tokenizer().encode("the quick fox")
    expected = tokens(generate(llm, ids))
    for dtype in (torch.int32, torch.int64, torch.uint8 if max(ids) < 256 else torch.int16):
        tensor = torch.tensor(ids, dtype=dtype)
        for form in (tensor, tensor[None], [tensor], {"prompt_token_ids": tensor}, Array(tensor)):
            assert tokens(generate(llm, form)) == expected
    strided = torch.tensor([[i, 0] for i in ids])[:, 0]
    assert tokens(generate(llm, [strided, torch.stack([strided] * 2)[1]])) == expected * 2
    with pytest.raises(InvalidArgument, match=r"prompts\[1\] must be an integer array .* float32"):
        generate(llm, [ids, torch.ones(3)])


def test_forms_may_be_mixed_in_one_batch(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello world")
    outputs = generate(llm, ["hello world", ids, np.array(ids), {"prompt": "hello world"}])
    assert len({tuple(ids) for ids in tokens(outputs)}) == 1


def test_text_is_what_the_tokenizer_decodes(llm: LLM) -> None:
    (output,) = generate(llm, "hello", SamplingParams(max_tokens=40, seed=3, ignore_eos=True))
    completion = output.outputs[0]
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)


def test_n_gives_that_many_continuations_and_their_seeds_give_them_again(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True)
    (output,) = generate(llm, "hello", params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    for completion in output.outputs:
        assert completion.seed is not None
        alone = SamplingParams(seed=completion.seed, max_tokens=12, ignore_eos=True)
        assert tokens(generate(llm, "hello", alone)) == [completion.token_ids]


def test_logprobs_are_of_the_raw_distribution_and_ranked(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, logprobs=3, seed=5, temperature=2.0, ignore_eos=True)
    completion = generate(llm, "hello", params)[0].outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 6
    total = 0.0
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert len(entry) in (3, 4)
        ranks = sorted(logprob.rank for logprob in entry.values())
        assert ranks[:3] == [1, 2, 3]
        by_rank = sorted(entry.values(), key=lambda logprob: logprob.rank)
        assert [x.logprob for x in by_rank] == sorted((x.logprob for x in by_rank), reverse=True)
        assert all(x.logprob <= 0.0 for x in by_rank)
        assert entry[token_id].decoded_token == llm.get_tokenizer().token_text(token_id)
        total += entry[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    completion = generate(llm, "hello")[0].outputs[0]
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def test_max_tokens_none_runs_to_the_end_of_the_context(checkpoint: Path) -> None:
    with LLM(checkpoint, num_threads=1, max_model_len=40) as llm:
        params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
        completion = generate(llm, [[5] * 30], params)[0].outputs[0]
    assert len(completion.token_ids) == 10
    assert completion.finish_reason == "length"


def test_a_stop_string_ends_the_text_and_is_named(llm: LLM) -> None:
    whole = generate(llm, "hello")[0].outputs[0].text
    stop = whole[2:4]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop=stop)
    completion = generate(llm, "hello", params)[0].outputs[0]
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(llm: LLM) -> None:
    ids = tokens(generate(llm, "hello"))[0]
    stop = next(i for i in ids[1:] if ids.index(i) > 0)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=[stop])
    completion = generate(llm, "hello", params)[0].outputs[0]
    assert completion.token_ids == ids[: ids.index(stop) + 1]
    assert completion.text == llm.get_tokenizer().decode(ids[: ids.index(stop)])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_metrics_of_a_request_are_in_order(llm: LLM) -> None:
    before = time.time()
    metrics = generate(llm, "hello")[0].metrics
    assert before - CLOCK_DRIFT_S <= metrics.arrival_time <= metrics.queued_ts
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts < metrics.last_token_ts <= time.time() + CLOCK_DRIFT_S
    assert metrics.num_generation_tokens == 8


def test_a_prompt_seen_before_is_read_from_the_cache(llm: LLM) -> None:
    prompt = [[3, 1, 4, 1, 5, 9, 2, 6] * 8]
    llm.reset_prefix_cache()
    first = generate(llm, prompt)[0]
    second = generate(llm, prompt)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= 48
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    salted = generate(llm, [{"prompt_token_ids": prompt[0], "cache_salt": "other tenant"}])[0]
    assert salted.num_cached_tokens == 0


def test_default_params_are_those_of_generation_config(checkpoint: Path, tmp_path: Path) -> None:
    model = checkpoints.copy_checkpoint(checkpoint, tmp_path)
    config = {"temperature": 0.0, "top_k": 7, "max_new_tokens": 5, "eos_token_id": [1, 2]}
    (model / "generation_config.json").write_text(json.dumps(config))
    with LLM(model, num_threads=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(
            temperature=0.0, top_k=7, max_tokens=5
        )
        assert len(tokens(llm.generate("hello", use_tqdm=False))[0]) <= 5
    with LLM(model, num_threads=1, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_a_recommended_repetition_penalty_is_taken(checkpoint: Path, tmp_path: Path) -> None:
    model = checkpoints.copy_checkpoint(checkpoint, tmp_path)
    (model / "generation_config.json").write_text('{"repetition_penalty": 1.1, "top_k": 3}')
    with LLM(model, num_threads=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(top_k=3, repetition_penalty=1.1)


def test_requests_without_a_seed_draw_theirs_from_the_llms(checkpoint: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with LLM(checkpoint, num_threads=1, seed=seed) as llm:
            return tokens(generate(llm, [[5, 6]] * 3, SamplingParams(ignore_eos=True)))

    first = run(1)
    assert run(1) == first
    assert run(2) != first
    assert len({tuple(ids) for ids in first}) == 3


def test_priorities_decide_who_is_served_first(checkpoint: Path) -> None:
    prompts = [[5, 6 + i] for i in range(6)]
    settings = {"num_threads": 1, "max_num_seqs": 1, "scheduling_policy": "priority"}
    with LLM(checkpoint, **settings) as llm:  # type: ignore[arg-type]
        # Something long runs while the others queue up.
        blocker = llm.stream([1, 2], SamplingParams(max_tokens=250, ignore_eos=True))
        next(blocker)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, priority=[5, 4, 3, 2, 1, 0])
        blocker.close()  # type: ignore[attr-defined]
    first_tokens = [output.metrics.first_token_ts for output in outputs]
    assert sorted(first_tokens, reverse=True) == first_tokens


def test_a_bad_generation_config_is_named(checkpoint: Path, tmp_path: Path) -> None:
    model = checkpoints.copy_checkpoint(checkpoint, tmp_path)
    for text, message in [
        ('{"temperature": "hot"}', "temperature must be a number, got 'hot'"),
        ('{"top_p": 7}', r"top_p must be in \(0, 1\], got 7"),
        ('{"eos_token_id": [1, -1]}', "eos_token_id must be between 0"),
        ("{", "not JSON at byte 1"),
    ]:
        (model / "generation_config.json").write_text(text)
        with pytest.raises(CorruptFile, match=f"generation_config.json: {message}"):
            LLM(model)


BAD_PROMPTS = [
    (None, "prompts must be a string"),
    (3, "prompts must be a string"),
    (b"hello", "prompts must be a string"),
    ("", "prompt is empty; a prompt has at least one token"),
    ([[]], "prompt is empty"),
    (["ok", ""], r"prompts\[1\] is empty"),
    (
        [[1], [2, -1]],
        r"prompts\[1\]\[1\] is token id -1, outside the model's vocabulary \(0 to 319\)",
    ),
    ([320], r"prompt\[0\] is token id 320, outside the model's vocabulary \(0 to 319\)"),
    ([[2**70]], r"prompt: prompt_token_ids\[0\] is 1180591620717411303424, and the ids of every"),
    ([[1], [2, 2**31]], r"prompts\[1\]: prompt_token_ids\[1\] is 2147483648, and the ids of every"),
    ([[1], [-(10**5000)]], r"prompts\[1\]: prompt_token_ids\[0\] is a number of thousands of dig"),
    ([[1, "a"]], r"prompt\[1\] must be an integer, got 'a'"),
    ([[1, True]], r"prompt\[1\] must be an integer, got True"),
    ([1, 2, 3.5], r"prompt\[2\] must be an integer, got 3.5"),
    (["ok", 3], r"prompts\[1\] must be a string or token ids, got 3"),
    (["ok", None], r"prompts\[1\] must be a string or token ids, got None"),
    ([[5] * 256], "prompt has 256 tokens, but max_model_len=256"),
    ({"prompt_tokens": [1]}, "prompt has no argument 'prompt_tokens'; did you mean"),
    ({"cache_salt": "x"}, "prompt needs 'prompt' or 'prompt_token_ids'"),
    ({"prompt": 3}, r"prompt\['prompt'\] must be a string, got 3"),
    ({"prompt": "a", "cache_salt": 3}, r"prompt\['cache_salt'\] must be a string, got 3"),
    (
        np.array([1.0]),
        r"prompt must be an integer array of one dimension, got float64 of shape \(1,\)",
    ),
    ([np.zeros((2, 2), np.int32), [1]], r"prompts\[0\] must be an integer array of one dimension"),
    ("a\ud800", "lone surrogate at character 1"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_with_its_index(llm: LLM, prompts: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        generate(llm, prompts)


BAD_CALLS = [
    ({"sampling_params": [GREEDY]}, "2 prompts need one SamplingParams or 2, got 1"),
    ({"sampling_params": {"n": 2}}, "sampling_params must be SamplingParams or a list of them"),
    ({"sampling_params": [GREEDY, None]}, r"sampling_params\[1\] must be SamplingParams, got None"),
    (
        {"sampling_params": SamplingParams(logprobs=21)},
        r"sampling_params\[0\]: logprobs=21 asks for 21 a token, more than max_logprobs=20",
    ),
    (
        {"sampling_params": SamplingParams(stop_token_ids=[600])},
        r"sampling_params\[0\]: stop_token_ids: token id 600 is outside the vocabulary",
    ),
    ({"priority": [1]}, "priority must be a list with one integer for each of the 2 prompts"),
    ({"priority": [1, "x"]}, r"priority\[1\] must be an integer"),
    ({"priority": [0, 3]}, "priority=3 has no effect under scheduling_policy='fcfs'; .*'priority'"),
    ({"use_tqdm": 3}, "use_tqdm must be True or False"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS)
def test_a_bad_argument_is_refused(llm: LLM, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        llm.generate(["hello", "world"], **arguments)  # type: ignore[arg-type]


def test_what_vllms_prompts_have_besides_is_refused_unless_it_is_empty(llm: LLM) -> None:
    (output,) = generate(llm, {"prompt": "hello", "multi_modal_data": None, "token_type_ids": []})
    assert output.finished
    with pytest.raises(
        NotSupported, match=r"prompt\['multi_modal_data'\] .* models take text alon"
    ):
        generate(llm, {"prompt": "hello", "multi_modal_data": {"image": 1}})
    with pytest.raises(NotSupported, match=r"prompts\[1\]\['encoder_prompt'\] is not supported"):
        generate(llm, ["a", {"encoder_prompt": "hello"}])


def test_nothing_runs_if_one_prompt_is_bad(llm: LLM) -> None:
    before = llm.get_metrics()
    with pytest.raises(InvalidArgument, match=r"prompts\[100\]"):
        generate(llm, [[5, 6]] * 100 + [[9999]])
    after = llm.get_metrics()
    assert after.num_prompt_tokens == before.num_prompt_tokens
    assert after.num_requests_running + after.num_requests_waiting == 0


BAD_SETTINGS = [
    (
        {"max_modellen": 5},
        InvalidArgument,
        "LLM has no argument 'max_modellen'; did you mean 'max_model_len'",
    ),
    ({"nnodes": 2}, InvalidArgument, "nnodes=2 with 1 ranks: each node has at least one"),
    (
        {"quantization": "int3"},
        NotSupported,
        "quantization 'int3' is not supported; use one of: int8, int4, int4-g32, int4-asym",
    ),
    ({"quantization": 8}, InvalidArgument, "quantization must be a string, got 8"),
    ({"trust_remote_code": True}, NotSupported, "LLM: trust_remote_code=True"),
    ({"enable_lora": True}, NotSupported, "LLM: enable_lora=True"),
    (
        {"tokenizer_mode": "custom"},
        NotSupported,
        "LLM: tokenizer_mode='custom' is not supported: the tokenizers library .*leave it at 'aut",
    ),
    ({"load_format": "dummy"}, NotSupported, "load_format='dummy' is not supported: there is one"),
    ({"data_parallel_rank": 2}, NotSupported, "data_parallel_rank=2 .*: replicas are threads of"),
    ({"cpu_offload_gb": 4}, NotSupported, "cpu_offload_gb=4 .*; leave it at 0"),
    ({"disable_log_stats": "x"}, NotSupported, "disable_log_stats='x'"),
    ({"block_size": "16"}, InvalidArgument, "block_size must be an integer, got '16'"),
    ({"block_size": 0}, InvalidArgument, "block_size must be between 1 and"),
    ({"seed": -1}, InvalidArgument, "seed must be between 0 and"),
    ({"dtype": 16}, InvalidArgument, "dtype must be a string, got 16"),
    ({"dtype": int}, InvalidArgument, "dtype.*int"),
    ({"dtype": "float8"}, InvalidArgument, "dtype"),
    ({"device": "tpu"}, NotSupported, "tpu"),
    ({"scheduling_policy": "lottery"}, InvalidArgument, "must be one of fcfs, .*got 'lottery'"),
    ({"max_model_len": 10**6}, InvalidArgument, "max_model_len"),
    ({"gpu_memory_utilization": 7.0}, InvalidArgument, "gpu_memory_utilization"),
    (
        {"tokenizer": "/nowhere"},
        InvalidArgument,
        "tokenizer must be a folder with a",
    ),
    ({"generation_config": "best"}, InvalidArgument, "generation_config must be 'auto', 'vllm' or"),
    ({"num_threads": 0}, InvalidArgument, "num_threads must be between 1 and"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD_SETTINGS)
def test_a_bad_setting_is_refused(
    checkpoint: Path, settings: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(checkpoint, **settings)  # type: ignore[arg-type]


def test_a_pool_too_small_for_the_context_is_refused_with_the_numbers(checkpoint: Path) -> None:
    # 384 bytes a token: keys and values, 2 layers, 2 KV heads of 12, float32
    with pytest.raises(ResourceExhausted, match=r"needs 96.0 KiB of KV cache \(384 B a token\)"):
        LLM(checkpoint, kv_cache_memory_bytes=2**15)
    with LLM(checkpoint, kv_cache_memory_bytes=2**15, max_model_len=64) as llm:
        assert len(tokens(generate(llm, [[1] * 50]))[0]) == 8


def test_a_model_that_is_not_there_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is nothing at"):
        LLM(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="there is a file at"):
        LLM(tmp_path / "file")
    with pytest.raises(InvalidArgument, match=r"has no config\.json"):
        LLM(tmp_path)
    for name in ("", "a\0b"):
        with pytest.raises(InvalidArgument, match="model must be a path, got "):
            LLM(name)
    with pytest.raises(InvalidArgument, match="model must be the path"):
        LLM(3)  # type: ignore[arg-type]


def test_a_tokenizer_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = checkpoints.copy_checkpoint(checkpoint, tmp_path)
    tokenizer_files.save(tokenizer_files.byte_level(), model)
    with pytest.raises(InvalidArgument, match=r"does not fit the model: .*vocab_size=320"):
        LLM(model)


def test_a_token_that_was_added_beyond_the_embedding_is_refused_where_a_prompt_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoints.copy_checkpoint(demo_model_path(), tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "generation_config.json").read_text())
    config["eos_token_id"] = [2048, *config["eos_token_id"]]
    (model / "generation_config.json").write_text(json.dumps(config))
    guided = SamplingParams(
        max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[a-z]+"), seed=1
    )
    results = []
    for path in (demo_model_path(), model):
        with LLM(path, num_threads=1) as llm:
            results.append([generate(llm, "Once", p)[0].outputs for p in (GREEDY, guided)])
            if path == model:
                assert "adds ['[PAD]'] beyond the 2048 tokens" in caplog.text
                for prompt in ("a[PAD]", [69, 2048]):
                    with pytest.raises(InvalidArgument, match=r"token id 2048 \('\[PAD\]'\), outs"):
                        generate(llm, prompt)
    assert results[0] == results[1]


@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_model_without_a_tokenizer_takes_token_ids_only(
    is_skipped: bool, checkpoint: Path, tmp_path: Path
) -> None:
    model = checkpoints.copy_checkpoint(checkpoint, tmp_path)
    if not is_skipped:
        (model / "tokenizer.json").unlink()
    with LLM(model, num_threads=1, skip_tokenizer_init=is_skipped) as llm:
        completion = generate(llm, [[1, 2, 3]])[0].outputs[0]
        assert len(completion.token_ids) == 8
        assert completion.text == ""
        with pytest.raises(InvalidArgument, match=r"has no tokenizer, so that prompts must be"):
            generate(llm, "hello")
        with pytest.raises(InvalidArgument, match="stop strings need a tokenizer"):
            generate(llm, [[1]], SamplingParams(stop="x"))
        with pytest.raises(InvalidArgument, match=r"has no tokenizer"):
            llm.get_tokenizer()


def test_stream_gives_what_generate_gives_piece_by_piece(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=4, ignore_eos=True, n=2)
    whole = generate(llm, "hello", params)[0]
    last = list(llm.stream("hello", params))[-1]
    assert [c.text for c in last.outputs] == [c.text for c in whole.outputs]
    delta = SamplingParams(
        max_tokens=20, seed=4, ignore_eos=True, n=2, output_kind=RequestOutputKind.DELTA
    )
    texts, ids = ["", ""], [[], []]
    for output in llm.stream("hello", delta):
        for completion in output.outputs:
            assert completion.token_ids or completion.text or completion.finished()
            texts[completion.index] += completion.text
            ids[completion.index] += completion.token_ids
    assert texts == [c.text for c in whole.outputs]
    assert ids == [c.token_ids for c in whole.outputs]
    final = SamplingParams(max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)
    assert len(list(llm.stream("hello", final))) == 1


def test_stream_refuses_bad_input_before_the_first_output(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match="stream takes one prompt, got 2"):
        llm.stream(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="prompt is empty"):
        llm.stream("")


def test_leaving_a_stream_early_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("hello", LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    metrics = llm.get_metrics()
    assert metrics.num_requests_running == 0
    assert metrics.num_blocks_used == 0


def test_records_print_their_fields_in_order(llm: LLM) -> None:
    metrics = llm.get_metrics()
    text = repr(metrics)
    assert text.startswith("EngineMetrics(num_requests_running=0, num_requests_waiting=0, ")
    assert f"num_blocks_total={metrics.num_blocks_total}, " in text


def test_the_demo_model_writes_sentences() -> None:
    with LLM(demo_model_path()) as llm:
        params = SamplingParams(max_tokens=48, temperature=0.0)
        text = generate(llm, "Once upon a time", params)[0].outputs[0].text
    assert text.isascii()
    assert text.count(" ") > 15
    assert "." in text


def test_the_tokenizers_end_ends_a_text_where_the_configs_have_none(tmp_path: Path) -> None:
    model = checkpoints.copy_checkpoint(demo_model_path(), tmp_path)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((model / name).read_text())
        del fields["eos_token_id"]
        (model / name).write_text(json.dumps(fields))
    results = []
    for path in (demo_model_path(), model):
        with LLM(path, num_threads=1) as llm:
            prompt = llm.get_tokenizer().apply_chat_template(
                [{"role": "user", "content": "Hello"}], add_generation_prompt=True
            )
            greedy = SamplingParams(max_tokens=24, temperature=0.0)
            guided = SamplingParams(
                max_tokens=24, structured_outputs=StructuredOutputsParams(regex="Hello.*"), seed=1
            )
            completions = [generate(llm, [prompt], p)[0].outputs[0] for p in (greedy, guided)]
            assert [c.finish_reason for c in completions] == ["stop", "stop"]
            assert completions[0].stop_reason is None
            assert len(tokens(generate(llm, [prompt], replace(greedy, ignore_eos=True)))[0]) == 24
            (beams,) = llm.beam_search([prompt], BeamSearchParams(2, max_tokens=24))
            assert beams.sequences[0].finish_reason == "stop"
            results.append(([c.token_ids for c in completions], beams))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [(LLM, {}, 64), (LLM, {"enable_chunked_prefill": False}, 0), (AsyncLLM, {}, 0)],
)
def test_prompts_are_spread_where_a_batch_is_waited_for(
    checkpoint: Path, kind: type[LLM | AsyncLLM], options: dict[str, Any], expected: int
) -> None:
    llm = kind(checkpoint, num_threads=1, **options)
    assert llm._config.scheduler.min_spread_tokens == expected
    llm.close()
