"""One system in a process of its own: reads jobs as lines of JSON, answers with lines of JSON.

    python worker.py SYSTEM MODEL DTYPE NUM_THREADS

A job is {"prompts": [[token ids]], "max_tokens": n}; the answer {"elapsed_s": s, "tokens": [[ids]]}
holds greedy tokens, exactly max_tokens a prompt. The first line out tells the version and the
seconds from the import to a loaded model. Runs in the system's own environment and imports nothing
else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[list[int]]]


def llmserve(model: str, dtype: str, num_threads: int) -> tuple[str, Generate]:
    import llmserve
    from llmserve import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        num_threads=num_threads,
        enable_prefix_caching=False,  # the next round has the same prompts
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return llmserve.__version__, generate


def transformers(model: str, dtype: str, num_threads: int) -> tuple[str, Generate]:
    import torch
    import transformers

    torch.set_num_threads(num_threads)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype)
    ).eval()

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        # A static batch, padded on the left to the longest prompt.
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            result = network.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        return [row[width:].tolist() for row in result]

    return f"{transformers.__version__}, torch {torch.__version__}", generate


def llama_cpp(model: str, dtype: str, num_threads: int) -> tuple[str, Generate]:
    import llama_cpp
    import numpy as np

    # The file has the dtype.
    llama = llama_cpp.Llama(
        model_path=model,
        n_ctx=4096,
        n_batch=512,
        n_threads=num_threads,
        n_threads_batch=num_threads,
        logits_all=False,
        verbose=False,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        # One after another: the Python API runs one sequence.
        return [one(prompt, max_tokens) for prompt in prompts]

    def one(prompt: list[int], max_tokens: int) -> list[int]:
        llama.reset()
        llama.eval(prompt)
        tokens: list[int] = []
        while True:
            logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
            tokens.append(int(np.argmax(np.ctypeslib.as_array(logits, (llama.n_vocab(),)))))
            if len(tokens) == max_tokens:
                return tokens
            llama.eval(tokens[-1:])

    return llama_cpp.__version__, generate


SYSTEMS = {"llmserve": llmserve, "transformers": transformers, "llama.cpp": llama_cpp}


def main() -> None:
    system, model, dtype, num_threads = *sys.argv[1:4], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    start = time.perf_counter()
    version, generate = SYSTEMS[system](model, dtype, num_threads)
    ready = {"version": version, "load_s": time.perf_counter() - start}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        tokens = generate(job["prompts"], job["max_tokens"])
        elapsed_s = time.perf_counter() - start
        print(json.dumps({"elapsed_s": elapsed_s, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
