"""What the CUDA backend alone can get wrong; its ops are compared with ref in tests/parity."""

import os

import numpy as np
import pytest
from checkpoints import FAMILIES, checkpoint, reference_model
from llmserve import LLM, SamplingParams
from llmserve import _core_testing as testing
from llmserve.errors import ResourceExhausted
from parity.op_formulas import run_attention

REASON = testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]


@pytest.fixture(params=["plain", "auto", "invariant"])
def gemm(request, monkeypatch):
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", request.param)
    return request.param


@pytest.fixture
def cuda():
    return testing.make_backend("cuda")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("family", "gemm"),
    [
        *((family, "plain") for family in FAMILIES),
        *((family, "auto") for family in ("llama", "mistral", "qwen2", "qwen3")),
        ("llama", "invariant"),
    ],
)
def test_greedy_tokens_in_f32_equal_those_of_transformers(family, gemm, monkeypatch):
    import torch

    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", gemm)
    path = checkpoint(family)
    prompt = list(range(5, 25))
    reference = reference_model(path).generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    with LLM(path, device="cuda") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == reference[0, len(prompt) :].tolist()


def test_sampled_tokens_in_f32_equal_those_of_ref(gemm):
    path = checkpoint("qwen3")
    prompts = [list(range(5, 5 + n)) for n in (1, 17, 64, 90)]
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=3, max_tokens=24)
    tokens = {}
    for device in ("cuda", "ref"):
        with LLM(path, device=device) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens[device] = [list(output.outputs[0].token_ids) for output in outputs]
    assert tokens["cuda"] == tokens["ref"]


def test_prompts_of_embeddings_give_the_tokens_of_ref():
    path = checkpoint("llama")
    embeds = np.random.default_rng(5).standard_normal((7, 48), dtype=np.float32) / 8
    tokens = []
    for device in ("cuda", "ref"):
        options = {"enable_prompt_embeds": True, "kv_cache_memory_bytes": 2**22}
        with LLM(path, device=device, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            prompts = [{"prompt_embeds": embeds}, [5, 6, 7]]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


def test_a_cache_beyond_2_to_the_31_elements_is_addressed_right(cuda, rng):
    """The highest block of 2.3e9 elements (4.6 GB in bf16) and the only one of a small cache give
    the same bits; offsets in int32 would wrap."""
    heads, block_size, dim = 8, 16, 128
    num_blocks = 2**31 // (heads * block_size * dim) + 9000
    caches = [cuda.empty_device((num_blocks, heads, block_size, dim), "bfloat16") for _ in range(2)]
    last = num_blocks - 1
    keys, values = (rng.standard_normal((5, heads, dim), dtype=np.float32) for _ in range(2))
    cuda.store_kv(keys, values, last * block_size + np.arange(5), *caches)
    q = rng.standard_normal((1, heads, dim), dtype=np.float32)
    got = cuda.paged_attention(q, *caches, [0, 1], [5], np.array([[last]]), dim**-0.5)
    small = [np.zeros((1, heads, block_size, dim), np.uint16) for _ in range(2)]
    cuda.store_kv(keys, values, np.arange(5), *small)
    expected = cuda.paged_attention(q, *small, [0, 1], [5], np.array([[0]]), dim**-0.5)
    np.testing.assert_array_equal(got, expected)


def test_sequences_that_are_split_in_parts_have_the_bits_of_each_alone(rng):
    """Results of spans that pass the bound of what is kept of them at a time: one long context
    among many short ones, in the first part and in the second."""
    cuda, launch = testing.make_backend("cuda"), testing.cuda_launch
    kv_heads, group, dim, long = 8, 16, 64, 8192
    lens = [3] * 140
    lens[4] = lens[137] = long
    at_once, _ = launch.partial_parts([(group, n) for n in lens], kv_heads, dim)
    assert 5 < at_once < 138
    sequences = [
        tuple(rng.standard_normal((n, kv_heads, dim), dtype=np.float32) for _ in range(2))
        for n in lens
    ]
    queries = [rng.standard_normal((1, kv_heads * group, dim), dtype=np.float32) for _ in lens]
    got = run_attention(cuda, sequences, queries, dtype="bfloat16")
    for b in (0, 4, 137, 139):
        alone = run_attention(cuda, [sequences[b]], [queries[b]], dtype="bfloat16")
        np.testing.assert_array_equal(got[[b]], alone)


def test_many_steps_of_changing_indices_do_not_overtake_each_other(cuda, rng):
    """Indices go to the device without waiting: a slow op in front must not see later ones."""
    x = cuda.to_device(rng.standard_normal((4096, 1024), dtype=np.float32))
    host = cuda.to_numpy(x)
    outs = [cuda.to_device(np.zeros((64, 1024), np.float32)) for _ in range(40)]
    rows = [rng.integers(0, 4096, 64) for _ in outs]
    big = cuda.pack_linear([rng.standard_normal((4096, 1024), dtype=np.float32)], "float32")
    product = cuda.to_device(np.zeros((4096, 4096), np.float32))
    cuda.linear(x, big, out=product)
    for out, which in zip(outs, rows, strict=True):
        cuda.gather_rows(x, which, out=out)
    for out, which in zip(outs, rows, strict=True):
        np.testing.assert_array_equal(cuda.to_numpy(out), host[which])


@pytest.mark.parametrize("other", ["cublaslt", "invariant"])
def test_other_products_and_the_plain_one_agree(monkeypatch, rng, other):
    backends = {}
    for choice in ("plain", other):
        monkeypatch.setenv("LLMSERVE_CUDA_GEMM", choice)
        try:
            backends[choice] = testing.make_backend("cuda")
        except NotImplementedError as error:
            pytest.skip(str(error))
    for m, n, k in ((1, 512, 256), (3, 33, 127), (64, 1000, 1024), (200, 4096, 896)):
        x, bias = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal(n)
        for dtype in ("float32", "bfloat16"):
            w = rng.standard_normal((n, k), dtype=np.float32)
            got = [
                b.linear(x, b.pack_linear([w], dtype), bias.astype(np.float32))
                for b in backends.values()
            ]
            # The same operands, other orders of k terms: sqrt(k) * 2^-24 of the magnitude, times 8.
            np.testing.assert_allclose(*got, atol=8 * k**0.5 * 2**-24 * k**0.5)


def test_a_model_that_does_not_fit_is_refused_and_the_gpu_stays_usable(cuda):
    with pytest.raises(ResourceExhausted, match="the GPU has no"):
        cuda.empty_device((2**40,), "float32")
    assert cuda.linear(
        np.eye(4, dtype=np.float32), cuda.pack_linear([np.eye(4)[:2].astype("f4")], "float32")
    ).shape == (4, 2)


def test_several_backends_live_in_one_process():
    backends = [testing.make_backend("cuda") for _ in range(3)]
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for backend in backends:
        np.testing.assert_array_equal(backend.gather_rows(x, [2, 0]), x[[2, 0]])


@pytest.mark.skipif("LLMSERVE_CUDA_GEMM" in os.environ, reason="the choice was made outside")
def test_an_unknown_gemm_is_refused(monkeypatch):
    monkeypatch.setenv("LLMSERVE_CUDA_GEMM", "fast")
    with pytest.raises(ValueError, match="expected auto, plain, invariant, wgmma, mma or "):
        testing.make_backend("cuda")
