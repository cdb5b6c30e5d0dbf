"""Attention whose warps cut the values' columns: latents that all heads share, and what other
kernels do not take, beside the reference. A row has the same bits in any tile and company."""

import numpy as np
import op_formulas as formulas
import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

# Bytes of shared memory that a block may have, of compute capability 8.0 and 8.9.
SHARED_BYTES = (166912, 101376)


def make(**environment):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMSERVE_CUDA_GEMM", "invariant")
        patch.setenv("LLMSERVE_CUDA_ATTENTION", "mma")
        for name, value in environment.items():
            patch.setenv(f"LLMSERVE_{name}", str(value))
        return testing.make_backend("cuda", 2)


@pytest.fixture(scope="module")
def cuda():
    return make()


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def sequence(rng, length, kv_heads, key_width, value_width):
    """Values in the keys of a latent, where there is one KV head."""
    keys = normal(rng, length, kv_heads, key_width)
    is_latent = kv_heads == 1 and key_width > value_width
    values = keys[..., :value_width] if is_latent else normal(rng, length, kv_heads, value_width)
    return (keys, values), is_latent


def run(backend, sequences, queries, dtype="bfloat16", block_size=16, **options):
    pairs, latents = zip(*sequences, strict=True)
    return formulas.run_attention(
        backend, pairs, queries, block_size, dtype, values_in_keys=latents[0], **options
    )


# Contexts and tokens: ends of units, halves of units and spans, and beyond.
DECODE = [(1, 1), (32, 1), (64, 1), (65, 1), (255, 1), (256, 1), (257, 1), (600, 1)]
GUESSES = [(3, 3), (66, 4), (258, 3), (530, 5)]
CHUNKS = [(90, 30), (45, 45), (300, 1)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "widths", "lengths", "dtype"),
    [
        (16, 1, (576, 512), DECODE, "bfloat16"),  # DeepSeek-V2-Lite
        (16, 1, (576, 512), DECODE, "fp8"),
        (40, 1, (576, 512), GUESSES[:3], "bfloat16"),
        (20, 1, (576, 512), CHUNKS[:2], "fp8"),
        (40, 1, (288, 256), GUESSES, "bfloat16"),  # MiniCPM3
        (32, 1, (320, 256), CHUNKS, "fp8"),  # Mistral Small 4
        (3, 1, (48, 16), DECODE, "bfloat16"),  # a key of an odd number of steps
        (4, 1, (16, 16), CHUNKS, "bfloat16"),
        (71, 1, (64, 64), GUESSES, "bfloat16"),  # Falcon-7B
        (8, 2, (192, 128), GUESSES + CHUNKS, "bfloat16"),  # MiMo-V2
        (8, 2, (192, 128), GUESSES, "fp8"),
        (4, 2, (112, 112), CHUNKS, "bfloat16"),
        (6, 2, (120, 120), DECODE, "bfloat16"),  # Danube 3
        (20, 1, (104, 72), CHUNKS, "bfloat16"),
        (2, 2, (16, 304), DECODE[:5], "fp8"),  # values wider than keys
        (2, 1, (400, 80), DECODE[:5], "bfloat16"),
    ],
)
def test_every_shape_matches_the_reference(cuda, ref, rng, heads, kv_heads, widths, lengths, dtype):
    sequences = [sequence(rng, n, kv_heads, *widths) for n, _ in lengths]
    queries = [normal(rng, t, heads, widths[0]) for _, t in lengths]
    for options in ({}, {"window": 70, "soft_cap": 5.0, "sinks": normal(rng, heads)}):
        got, expected = (run(b, sequences, queries, dtype, **options) for b in (cuda, ref))
        np.testing.assert_allclose(got, expected, atol=formulas.ROUNDED_ATTENTION_TOLERANCE)
        assert np.isfinite(got).all()  # what lies in unused slots is NaN


@pytest.mark.parametrize(
    ("heads", "kv_heads", "widths", "dtype", "window"),
    [
        (10, 1, (80, 64), "bfloat16", 0),
        (18, 1, (80, 64), "fp8", 290),
        (6, 2, (48, 32), "bfloat16", 290),
    ],
)
def test_a_token_has_the_same_bits_in_decoding_guesses_chunks_and_a_prompt(
    cuda, rng, heads, kv_heads, widths, dtype, window
):
    n = 540
    one = sequence(rng, n, kv_heads, *widths)
    other = sequence(rng, 90, kv_heads, *widths)
    q, other_q = normal(rng, n, heads, widths[0]), normal(rng, 2, heads, widths[0])
    options = {"window": window, "sinks": normal(rng, heads), "dtype": dtype}
    whole = run(cuda, [one], [q], **options)
    ends = ((0, 1), (63, 66), (254, 257), (255, 256), (256, 257), (300, 340), (512, 513), (530, n))
    for begin, end in ends:
        prefix = tuple(part[:end] for part in one[0]), one[1]
        batch = [other, prefix, other], [other_q, q[begin:end], other_q]
        got = run(cuda, *batch, block_size=4 if begin % 2 else 32, **options)
        np.testing.assert_array_equal(got[2:-2], whole[begin:end])


@pytest.mark.parametrize("length", [4097, 8200])
def test_stretches_spans_and_one_block_for_all_have_the_same_bits(cuda, ref, rng, length):
    """As many heads of one token as make a block take all of the context."""
    heads = testing.cuda_launch.COLUMN_SPLIT_ROWS + 4
    one = sequence(rng, length, 1, 32, 16)
    q = normal(rng, 1, heads, 32) * 3
    for options in ({}, {"window": 4100}):
        whole = run(cuda, [one], [q], **options)
        expected = run(ref, [one], [q[:, :2]], **options)
        np.testing.assert_allclose(
            whole[:, :2], expected, atol=formulas.ROUNDED_ATTENTION_TOLERANCE
        )
        by_stretches = make(CUDA_DECODE_SPANS="all")
        for backend in (cuda, by_stretches):
            for first, last in ((0, 3), (100, 140)):
                few = run(backend, [one], [q[:, first:last]], **options)
                np.testing.assert_array_equal(few, whole[:, first:last])


@pytest.mark.parametrize("shared_bytes", SHARED_BYTES)
def test_gpus_with_less_shared_memory_have_the_same_bits(cuda, rng, shared_bytes):
    if "emulated" not in cuda.description:
        pytest.skip("a GPU has the shared memory that it has")
    small = make(EMULATOR_SHARED_BYTES=shared_bytes)
    for widths, dtype in (((576, 512), "bfloat16"), ((288, 256), "fp8"), ((288, 256), "bfloat16")):
        lengths = [(300, 1), (70, 2)]
        sequences = [sequence(rng, n, 1, *widths) for n, _ in lengths]
        queries = [normal(rng, t, 20, widths[0]) for _, t in lengths]
        got, expected = (run(b, sequences, queries, dtype) for b in (small, cuda))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("shared_bytes", [SHARED_BYTES[1], 232448])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_copies_that_land_at_once_and_late_give_the_same_bits(
    cuda, rng, monkeypatch, shared_bytes, dtype
):
    if "emulated" not in cuda.description:
        pytest.skip("a GPU's copies land when they do")
    backend = make(EMULATOR_SHARED_BYTES=shared_bytes)
    # Warps without columns are ahead of the one that has them.
    widths = (288, 16) if dtype == "fp8" else (576, 64)
    for heads in (16, 20):
        args = [sequence(rng, 400, 1, *widths)], [normal(rng, 1, heads, widths[0])], dtype
        expected = run(cuda, *args)
        for when in ("late", "early"):
            monkeypatch.setenv("LLMSERVE_EMULATOR_COPIES", when)
            np.testing.assert_array_equal(run(backend, *args), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_a_row_of_nan_reaches_those_who_see_it_and_rows_of_the_same_sequence(cuda, rng, dtype):
    n, heads, window = 150, 20, 40
    one, other = (sequence(rng, n, 1, 80, 64) for _ in range(2))
    q = normal(rng, 6, heads, 80)
    clean = run(cuda, [one, other], [q, q], dtype, window=window)
    one[0][0][n - 3, 0, 3] = np.nan  # which its first three tokens do not see
    got = run(cuda, [one, other], [q, q], dtype, window=window)
    assert np.isnan(got[3:6]).any(-1).all()
    np.testing.assert_array_equal(got[6:], clean[6:])  # the other sequence
    seen = tuple(part[: n - 3] for part in one[0]), True
    alone = run(cuda, [seen], [q[2:3]], dtype, window=window)
    np.testing.assert_array_equal(alone, clean[2:3])


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("length", [1, 20, 33])
def test_what_a_block_left_in_shared_memory_reaches_no_other_one(cuda, rng, dtype, length):
    bad, short = (sequence(rng, n, 1, 80, 64) for n in (400, length))
    bad[0][0][:] = np.nan
    q = normal(rng, 1, 20, 80)
    alone = run(cuda, [short], [q], dtype)
    got = run(cuda, [bad, short], [q, q], dtype)
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[1:], alone)


def test_many_sequences_are_split_in_parts_with_the_bits_of_each_alone(cuda, rng):
    """What pieces pass on beyond its bound: one long context among short ones."""
    heads, widths, launch = 32, (16, 512), testing.cuda_launch
    lens = [3] * 300
    lens[4], lens[297] = 300, 7 * launch.COLUMN_STRETCH + 1
    at_once, slots, _ = launch.column_parts([(heads, n) for n in lens], 1, widths[1])
    assert 5 < at_once < 297
    assert slots == 8
    sequences = [sequence(rng, n, 1, *widths) for n in lens]
    queries = [normal(rng, 1, heads, 16) for _ in lens]
    got = run(cuda, sequences, queries)
    for b in (0, 4, 297, 299):
        alone = run(cuda, [sequences[b]], [queries[b]])
        np.testing.assert_array_equal(got[[b]], alone)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_model_of_latents_has_the_same_tokens_in_chunks_alone_and_recorded(
    monkeypatch, kv_cache_dtype
):
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "invariant")
    path = checkpoint("deepseek_v2", qk_rope_head_dim=16)  # rows of 48
    prompts = [list(range(5 + i, 25 + 9 * i)) for i in range(3)]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=1)

    def run(batches, **options):
        fields = {"max_model_len": 96, "block_size": 8, "enable_prefix_caching": False, **options}
        with LLM(
            path, device="cuda", dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, **fields
        ) as llm:
            outputs = [o for batch in batches for o in llm.generate(batch, params, use_tqdm=False)]
        samples = [output.outputs[0] for output in outputs]
        return [
            [(t, at[t].logprob) for t, at in zip(s.token_ids, s.logprobs, strict=True)]
            for s in samples
        ]

    together = run([prompts])
    assert run([[prompt] for prompt in prompts], max_num_batched_tokens=7) == together
    assert run([prompts], enforce_eager=True, max_num_batched_tokens=16) == together
