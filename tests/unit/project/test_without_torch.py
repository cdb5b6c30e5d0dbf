"""The whole package without torch and the other extras: importing them is an error here."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

BLOCKED = {
    *("torch", "transformers", "huggingface_hub", "rich", "matplotlib", "safetensors"),
    *("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client", "openai", "yaml"),
    "llguidance",
}


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise AssertionError(f"{name} was imported")


sys.meta_path.insert(0, Blocker())

import numpy as np
from llmserve import LLM, Array, BlockAllocator, SamplingParams, Scheduler, demo_model_path, ops

with LLM(demo_model_path(), num_threads=1, max_model_len=128) as llm:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
    ids = np.array(llm.get_tokenizer().encode("Once upon a time"))
    by_text, by_array = llm.generate(["Once upon a time", ids], params, use_tqdm=False)
    assert by_text.outputs[0].token_ids == by_array.outputs[0].token_ids
    assert len(list(llm.stream("The fox", params))[-1].outputs[0].token_ids) == 4
    (embedded,) = llm.embed("The fox", use_tqdm=False)
    assert len(embedded.outputs.embedding) == embedded.outputs.hidden_size

x = np.arange(8, dtype=np.float32).reshape(2, 4)
normed = ops.rms_norm(x, np.ones(4, np.float32))
assert isinstance(normed, np.ndarray)
weight = ops.pack_linear(Array(x, "bfloat16"))
np.testing.assert_array_equal(ops.linear(x, weight), x @ x.T)
pool = BlockAllocator(num_blocks=2, block_size=2)
keys = Array(np.zeros((2, 1, 2, 4), np.float32), "bfloat16")
values = Array(np.zeros((2, 1, 2, 4), np.float32), "bfloat16")
table = pool.allocate("a", 2)
slots = [table[0] * 2, table[0] * 2 + 1]
ops.store_kv(x[:, None], x[:, None], keys, values, slots)
attended = ops.paged_attention(x[1:, None], keys, values, [table], [2])
assert attended.shape == (1, 1, 4)
assert ops.sample(x, temperature=0.0).tolist() == [3, 3]
assert isinstance(np.asarray(keys), np.ndarray)

scheduler = Scheduler(num_blocks=4)
scheduler.add(0, [1, 2, 3])
assert len(scheduler.commit([1] * len(scheduler.schedule().logit_rows))) == 1
assert not BLOCKED & set(sys.modules)
print("done")
"""


def test_generation_ops_and_scheduling_need_neither_torch_nor_extras() -> None:
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (finished.stdout, finished.returncode) == ("done\n", 0), finished.stderr
