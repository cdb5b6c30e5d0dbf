"""How many kernels a decoding step of one request is: each of them costs some 2 us beside what it
reads. The emulator counts them."""

import ctypes
from pathlib import Path

import llmserve
import pytest
from checkpoints import checkpoint
from llmserve import LLM, SamplingParams, _core_testing

REASON = _core_testing.unavailable_reason("cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(REASON), reason=f"no CUDA here: {REASON}")]

# Norm with queries, keys and values; attention; output with residual; norm with gate and up; down
# with residual.
IN_A_LAYER = 5
# Tokens of the step before, embedding, angles, final norm, head, rows to draw, the two passes of
# drawing, results.
BESIDE_LAYERS = 9


@pytest.fixture
def counter():
    library = Path(llmserve.__file__).parent / "lib" / "libllmserve_cuda.so"
    try:
        return ctypes.c_int64.in_dll(ctypes.CDLL(str(library)), "llmserve_emulator_num_kernels")
    except ValueError:
        pytest.skip("a GPU counts no kernels; the emulator does")


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_a_decoding_step_is_five_kernels_a_layer(counter, enforce_eager):
    def kernels_a_step(num_layers):
        overrides = {"head_dim": 64, "num_hidden_layers": num_layers}
        options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 8}
        path, counts = checkpoint("qwen3", **overrides), []
        with LLM(
            path, device="cuda", dtype="bfloat16", enforce_eager=enforce_eager, **options
        ) as llm:
            for num_tokens in (6, 16):
                before = counter.value
                params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
                llm.generate([[5, 6, 7]], params, use_tqdm=False)
                counts.append(counter.value - before)
        return (counts[1] - counts[0]) / 10

    assert kernels_a_step(1) == IN_A_LAYER + BESIDE_LAYERS
    assert kernels_a_step(3) == 3 * IN_A_LAYER + BESIDE_LAYERS
