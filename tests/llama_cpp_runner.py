"""Greedy tokens of llama-cpp-python, in a process of its own: `python llama_cpp_runner.py < jobs`.

Jobs and answers are JSON: {"model": path, "prompts": [[id]], "max_tokens": n} to [[id]]. Keys and
values are kept in F32, and logits come from one thread, so that little is rounded.
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


if __name__ == "__main__":
    json.dump([greedy(job) for job in json.load(sys.stdin)], sys.stdout)
