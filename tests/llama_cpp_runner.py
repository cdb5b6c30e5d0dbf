"""Greedy tokens of llama-cpp-python, in a process of its own: `python llama_cpp_runner.py < jobs`.

Jobs and answers are JSON: {"model": path, "prompts": [[id]], "max_tokens": n} to [[id]], or the ids
of {"model": path, "texts": [text]}. Keys and values are kept in F32, and logits come from one
thread, so that little is rounded.
"""

import json
import sys
from typing import Any


def greedy(job: dict[str, Any]) -> list[list[int]]:
    import llama_cpp
    import numpy as np

    llm = llama_cpp.Llama(
        model_path=job["model"],
        n_ctx=256,
        n_threads=1,
        n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        logits_all=True,
        verbose=False,
    )
    answers = []
    for prompt in job["prompts"]:
        llm.reset()
        tokens: list[int] = []
        step = list(prompt)
        for _ in range(job["max_tokens"]):
            llm.eval(step)
            tokens.append(int(np.argmax(llm.scores[llm.n_tokens - 1])))
            step = tokens[-1:]
        answers.append(tokens)
    return answers


def tokenize(job: dict[str, Any]) -> list[list[int]]:
    import llama_cpp

    llm = llama_cpp.Llama(model_path=job["model"], vocab_only=True, verbose=False)
    return [llm.tokenize(t.encode(), add_bos=False, special=False) for t in job["texts"]]


if __name__ == "__main__":
    jobs = json.load(sys.stdin)
    json.dump([tokenize(job) if "texts" in job else greedy(job) for job in jobs], sys.stdout)
