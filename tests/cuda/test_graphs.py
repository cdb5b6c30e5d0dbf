"""Decode steps recorded as graphs: the tokens are those of steps that are asked for one by one."""

from importlib.util import find_spec

import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams, StructuredOutputsParams, _core_testing

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


# Steps are counted when both requests are in the first one: the second may be handed over when the
# engine has begun with the first, and then steps are others.
NUM_TRIES = 5
# What log-probabilities of 128 tokens are asked for and come back in, which no graph uses.
EDITS_BYTES = 2**17


@pytest.fixture(scope="module", autouse=True)
def plain_products():
    """With the same bits whatever the batch is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", "plain")
        yield


def generate(prompts, params, *, family="qwen3", overrides=None, **options):
    """Token ids of each sample, and how many steps were captured and replayed."""
    fields = {"max_model_len": 96, "max_num_batched_tokens": 32, "block_size": 8, **options}
    with LLM(checkpoint(family, **(overrides or {})), device="cuda", **fields) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        metrics = llm.get_metrics()
    samples = [sample.token_ids for output in outputs for sample in output.outputs]
    return samples, (metrics.num_graph_captures, metrics.num_graph_replays)


def mixed_params(count):
    """Some greedy, some drawn; they end at different times, so that batches of all sizes come."""
    return [
        SamplingParams(
            max_tokens=4 + 2 * i,
            ignore_eos=True,
            temperature=0.9 if i % 2 else 0.0,
            seed=i,
            top_p=0.9 if i % 3 else 1.0,
        )
        for i in range(count)
    ]


def test_graphs_change_no_token_whatever_the_batch_is():
    # Nine rows fill ten up; the pool is too small for all, so that some return.
    prompts = [list(range(5 + i, 8 + 2 * i)) for i in range(9)]
    params = mixed_params(9)
    options = {"max_num_seqs": 10, "num_gpu_blocks_override": 24}
    eager, counts = generate(prompts, params, enforce_eager=True, **options)
    assert counts == (0, 0)
    graphs, (num_captures, num_replays) = generate(prompts, params, **options)
    assert graphs == eager
    assert num_captures >= 2
    assert num_replays > num_captures


def test_graphs_over_an_fp8_cache_change_no_token():
    overrides = {"head_dim": 64, "num_hidden_layers": 1}
    prompts = [list(range(5 + i, 9 + 3 * i)) for i in range(3)]
    options = {"kv_cache_dtype": "fp8", "overrides": overrides}
    eager, _ = generate(prompts, mixed_params(3), enforce_eager=True, **options)
    graphs, (num_captures, num_replays) = generate(prompts, mixed_params(3), **options)
    assert graphs == eager
    assert num_captures >= 1
    assert num_replays > num_captures


@pytest.mark.parametrize("count", [1, 8])
def test_kernels_that_start_early_change_no_token(monkeypatch, count):
    """Prompts of eight tokens and batches of eight: no product is a library's, and a chain of the
    backend's own kernels is a step. Contexts grow beyond a unit of attention and a span."""
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "auto")
    overrides = {"head_dim": 64, "num_hidden_layers": 3, "max_position_embeddings": 1024}
    options = {"max_model_len": 400, "max_num_batched_tokens": 8, "max_num_seqs": 8}
    num_tokens = 270 if count == 1 else 70
    params = [SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)] * count
    prompts = [[3 + i, 5, 7, 11, 13, 17, 19, 23][: 8 - i] for i in range(count)]
    got = {}
    for launch in ("plain", "early"):
        monkeypatch.setenv("LLMSERVE_CUDA_LAUNCH", launch)
        got[launch] = generate(prompts, params, overrides=overrides, dtype="bfloat16", **options)
    assert got["early"][0] == got["plain"][0]
    num_captures, num_replays = got["early"][1]
    assert num_replays > num_captures > 0


def test_no_step_is_so_large_that_graphs_end():
    """The largest step's memory is there from the start: nothing that a graph uses moves."""
    decode = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
    edited = SamplingParams(max_tokens=3, temperature=1.0, seed=1, logprobs=3, prompt_logprobs=2)
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "block_size": 8}
    overrides = {"head_dim": 64, "num_hidden_layers": 1, "max_position_embeddings": 1024}
    path = checkpoint("qwen3", **overrides)
    with LLM(path, device="cuda", dtype="bfloat16", max_model_len=400, **options) as llm:
        loaded = llm.get_memory_use()
        planned = loaded.weight_bytes + loaded.workspace_bytes + loaded.kv_cache_bytes
        assert abs(loaded.pool_used_bytes - planned) < EDITS_BYTES
        llm.generate([[5, 6, 7]], decode, use_tqdm=False)
        use = llm.get_memory_use()
        assert use.graph_bytes >= 0  # small ones fit memory that the driver has taken already
        assert llm.get_metrics().num_graph_captures > 0
        prompts = [list(range(3, 153)) * 2, *([i] * 20 for i in range(7))]
        llm.generate(prompts, [decode, *[edited] * 7], use_tqdm=False)
        before = llm.get_metrics()
        llm.generate([[8, 9, 10]], decode, use_tqdm=False)
        after = llm.get_metrics()
        assert after.num_graph_captures == before.num_graph_captures
        assert after.num_graph_replays == before.num_graph_replays + 5
        grown = llm.get_memory_use().pool_used_bytes - use.pool_used_bytes
    assert grown < EDITS_BYTES


def test_rows_that_ask_for_more_are_drawn_behind_recorded_layers():
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    params = [
        SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.8, seed=3),
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0, logprobs=1),
    ]
    eager, _ = generate(prompts, params, enforce_eager=True)
    for _ in range(NUM_TRIES):
        graphs, counts = generate(prompts, params)
        assert graphs == eager
        if counts == (2, 11):
            break
    # Four steps of both, of which the first runs as it is, then nine that the first runs alone.
    assert counts == (2, 11)


def test_every_kind_of_row_is_drawn_behind_recorded_layers():
    """Rows that fill the batch up have no part in it: nine requests run as 10, later 7 as 7."""

    def double(token_ids, logits):
        return logits * 2

    constrained = {}
    if find_spec("llguidance"):
        constrained = {"structured_outputs": StructuredOutputsParams(regex="[ab]{20,30}")}
    kinds = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "seed": 1, "frequency_penalty": 0.7, "presence_penalty": 0.2},
        {"temperature": 0.8, "seed": 2, "logprobs": 3},
        {"temperature": 1.0, "seed": 3, "allowed_token_ids": list(range(3, 90))},
        {"temperature": 1.0, "seed": 4, "logit_bias": {7: 5.0}, "min_tokens": 5},
        {"temperature": 1.0, "seed": 5, "bad_words": ["a", "b"]},
        {"temperature": 1.0, "seed": 6, **constrained},
        {"temperature": 1.0, "seed": 7, "logits_processors": [double]},
        {"temperature": 1.0, "seed": 8},
    ]
    params = [
        SamplingParams(max_tokens=8 + i % 2 * 4, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]
    prompts = [list(range(5 + i, 8 + 2 * i)) for i in range(9)]
    options = {"max_num_seqs": 10, "num_gpu_blocks_override": 40}
    eager, counts = generate(prompts, params, enforce_eager=True, **options)
    assert counts == (0, 0)
    graphs, (num_captures, num_replays) = generate(prompts, params, **options)
    assert graphs == eager
    assert num_captures >= 1
    assert num_replays > num_captures


def test_a_graph_of_one_context_is_not_launched_for_a_longer_one():
    # On tensor cores, whose blocks along the context are a number of the launch.
    overrides = {"head_dim": 64, "num_hidden_layers": 1, "max_position_embeddings": 512}
    prompts = [list(range(3, 253)), [7, 8, 9]]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)] * 2
    options = {"max_model_len": 320, "max_num_batched_tokens": 256, "dtype": "bfloat16"}
    eager, _ = generate(prompts, params, overrides=overrides, enforce_eager=True, **options)
    for _ in range(NUM_TRIES):
        graphs, (num_captures, _) = generate(prompts, params, overrides=overrides, **options)
        assert graphs == eager
        if num_captures == 2:
            break
    assert num_captures == 2  # up to 256 tokens, and up to 320


def test_two_rotary_embeddings_are_both_in_the_graph():
    params = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)]
    eager, _ = generate([[5, 6, 7]], params, family="gemma3_text", enforce_eager=True)
    graphs, (num_captures, _) = generate([[5, 6, 7]], params, family="gemma3_text")
    assert graphs == eager
    assert num_captures == 1


def test_a_capture_that_fails_leaves_the_steps_as_they_were(monkeypatch):
    monkeypatch.setenv("LLMSERVE_EMULATOR_NO_GRAPHS", "all")
    params = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)]
    with LLM(checkpoint("qwen3"), device="cuda", max_model_len=96, block_size=8) as llm:
        if "(emulated" not in llm._engine.description:
            pytest.skip("only the emulated device refuses graphs when it is asked to")
        refused = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
        metrics = llm.get_metrics()
    assert (metrics.num_graph_captures, metrics.num_graph_replays) == (0, 0)
    assert [refused] == generate([[5, 6, 7]], params, enforce_eager=True)[0]


def test_what_was_captured_is_forgotten_when_memory_is_given_back():
    # The device's own numbers tell of it, too. Its pool takes memory in pieces of 32 MiB, of which
    # the cache has more than one to itself.
    params = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)]
    options = {"max_model_len": 96, "block_size": 8, "kv_cache_memory_bytes": 2**28}
    with LLM(checkpoint("qwen3"), device="cuda", **options) as llm:
        before = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
        num_captures = llm.get_metrics().num_graph_captures
        use = llm.get_memory_use()
        parts = use.weight_bytes + use.kv_cache_bytes
        assert parts + use.workspace_bytes < use.pool_used_bytes <= use.pool_reserved_bytes
        llm.sleep(2)
        asleep = llm.get_memory_use()
        assert asleep.pool_used_bytes <= use.pool_used_bytes - parts
        assert asleep.graph_bytes == 0
        assert asleep.pool_used_high_bytes >= use.pool_used_bytes
        assert asleep.pool_reserved_bytes < use.pool_reserved_bytes
        llm.wake_up()
        after = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
        assert after == before
        assert llm.get_metrics().num_graph_captures == num_captures + 1
