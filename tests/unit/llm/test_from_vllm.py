"""Scripts for vLLM's offline API run with their import changed, as docs/from-vllm.md says."""

import subprocess
import sys

import pytest
from llmserve import demo_model_path

# In vLLM's names throughout; MODEL stands for a checkpoint's directory.
SCRIPTS = {
    "generate": """
from vllm import LLM, SamplingParams

prompts = ["Once upon a time", "The capital of", "Question: what is 3 + 4?"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, seed=7)
llm = LLM(model=MODEL, max_model_len=256, enforce_eager=True)
outputs = llm.generate(prompts, sampling_params)
for output, prompt in zip(outputs, prompts):
    assert output.prompt == prompt and output.finished
    completion = output.outputs[0]
    assert completion.text and completion.finish_reason in ("stop", "length")
    assert len(completion.token_ids) <= 12 and output.lora_request is None
""",
    "sampling": """
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind

llm = LLM(MODEL, max_model_len=256, seed=1, gpu_memory_utilization=0.2, max_num_seqs=4)
tokenizer = llm.get_tokenizer()
ids = tokenizer.encode("Once upon a time")
params = SamplingParams(
    n=2, temperature=0.7, top_k=20, min_p=0.01, presence_penalty=0.1, frequency_penalty=0.1,
    repetition_penalty=1.05, stop=["the end"], max_tokens=8, min_tokens=2, logprobs=3,
    prompt_logprobs=2, logit_bias={5: -1.0}, bad_words=["xyz"], include_stop_str_in_output=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
)
(output,) = llm.generate(TokensPrompt(prompt_token_ids=ids), params, use_tqdm=False)
assert output.prompt_token_ids == ids and len(output.outputs) == 2
assert output.prompt_logprobs[0] is None and ids[1] in output.prompt_logprobs[1]
for completion in output.outputs:
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, choices in zip(completion.token_ids, completion.logprobs):
        assert choices[token_id].logprob <= 0 and choices[token_id].rank >= 1
        assert isinstance(choices[token_id].decoded_token, str)
assert llm.get_default_sampling_params().max_tokens
each = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3, ignore_eos=True)]
outputs = llm.generate([{"prompt": "a"}, {"prompt_token_ids": ids}], each)
assert len(outputs[1].outputs[0].token_ids) == 3
assert llm.reset_prefix_cache()
""",
    "tokenizer": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, max_model_len=256)
tokenizer = llm.get_tokenizer()
messages = [{"role": "user", "content": "Hello"}]
prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
params = SamplingParams(max_tokens=8, stop_token_ids=[tokenizer.eos_token_id]).clone()
(output,) = llm.generate(prompt, params, use_tqdm=False)
ids = output.outputs[0].token_ids
assert tokenizer.decode(ids, skip_special_tokens=True).startswith(output.outputs[0].text)
assert tokenizer(prompt).input_ids == output.prompt_token_ids
assert len(tokenizer.convert_ids_to_tokens(ids)) == len(ids) and max(ids) < len(tokenizer)
assert tokenizer.vocab_size and tokenizer.eos_token_id in tokenizer.all_special_ids
""",
    "arguments": """
from vllm import LLM

# Every argument at a default of vLLM's, which scripts write out.
llm = LLM(
    model=MODEL, task="generate", runner="auto", convert="auto", tokenizer_mode="auto",
    skip_tokenizer_init=False, trust_remote_code=False, allowed_local_media_path="",
    tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1,
    enable_expert_parallel=False, distributed_executor_backend=None, worker_cls="auto",
    dtype="float", quantization=None, revision=None, tokenizer_revision=None, seed=None,
    swap_space=4, cpu_offload_gb=0, enforce_eager=False, max_seq_len_to_capture=8192,
    disable_custom_all_reduce=False, disable_async_output_proc=False, hf_token=None,
    hf_overrides={}, mm_processor_kwargs=None, limit_mm_per_prompt={}, override_pooler_config=None,
    compilation_config=None, load_format="auto", config_format="auto", model_impl="auto",
    model_loader_extra_config={}, disable_log_stats=True, block_size=None,
    enable_prefix_caching=None, enable_chunked_prefill=None, async_scheduling=None,
    max_num_partial_prefills=1, long_prefill_token_threshold=0, enable_lora=False, max_loras=1,
    max_lora_rank=16, kv_transfer_config=None, logprobs_mode="raw_logprobs", logits_processors=None,
    disable_sliding_window=False, generation_config="auto", override_generation_config={},
    scheduling_policy="fcfs", max_model_len=None, num_gpu_blocks_override=None,
)
assert llm.max_model_len == 2048
""",
    "chat": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
]
outputs = llm.chat(conversation, SamplingParams(max_tokens=6), use_tqdm=False)
assert outputs[0].outputs[0].text is not None
outputs = llm.chat([conversation] * 3, SamplingParams(max_tokens=6), add_generation_prompt=True)
assert len(outputs) == 3
""",
    "beam_search": """
from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model=MODEL, max_model_len=128)
params = BeamSearchParams(beam_width=3, max_tokens=5)
outputs = llm.beam_search([{"prompt": "Once upon a time"}], params)
best = outputs[0].sequences[0]
assert len(outputs[0].sequences) == 3 and best.text and best.tokens
assert best.cum_logprob == max(s.cum_logprob for s in outputs[0].sequences)
""",
    "embed": """
from vllm import LLM

llm = LLM(model=MODEL, max_model_len=128)
outputs = llm.embed(["Hello", "A second text"])
first, second = (output.outputs.embedding for output in outputs)
assert len(first) == len(second) == outputs[0].outputs.hidden_size
""",
    "structured": """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model=MODEL, max_model_len=128)
guided = StructuredOutputsParams(choice=["Positive", "Negative"])
(output,) = llm.generate("Is it good?", SamplingParams(structured_outputs=guided))
assert output.outputs[0].text in ("Positive", "Negative")
""",
    "sleep": """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, max_model_len=128)
params = SamplingParams(temperature=0, max_tokens=5)
before = llm.generate("The fox", params)[0].outputs[0].token_ids
llm.sleep(level=1)
llm.wake_up()
assert llm.generate("The fox", params)[0].outputs[0].token_ids == before
""",
    "methods": """
from vllm import LLM, SamplingParams, BeamSearchParams

llm = LLM(model=MODEL, max_model_len=256)
params = SamplingParams(max_tokens=2)
messages = [{"role": "user", "content": "Hello"}]
llm.generate("a", params, lora_request=None, tokenization_kwargs=None, use_tqdm=False)
llm.chat(messages, params, use_tqdm=False, lora_request=None, chat_template_content_format="auto",
         mm_processor_kwargs=None, tokenization_kwargs=None)
llm.embed("a", lora_request=None, tokenization_kwargs=None, use_tqdm=False)
llm.encode("a", lora_request=None, use_tqdm=False)
llm.beam_search("a", BeamSearchParams(2, 2), lora_request=None, concurrency_limit=None)
llm.enqueue("a", params, lora_request=None)
for call, error in (
    (lambda: llm.chat(messages, params, lora_request="x"), "NotSupported: chat: lora_request='x'"),
    (lambda: llm.embed("a", nonsense=1), "TypeError: LLM.embed() got an unexpected"),
):
    try:
        call()
    except Exception as caught:
        assert f"{type(caught).__name__}: {caught}".startswith(error), caught
    else:
        raise AssertionError(error)
""",
    "async": """
import asyncio
from vllm import SamplingParams
from vllm import AsyncLLM


async def main():
    engine = AsyncLLM(MODEL, max_model_len=128)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    async for output in engine.generate("Once", params, request_id="r-1"):
        assert output.request_id == "r-1"
    assert output.finished and len(output.outputs[0].token_ids) == 5
    engine.close()


asyncio.run(main())
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_for_vllm_runs_with_its_import_changed(name):
    script = SCRIPTS[name].replace("from vllm", "from llmserve")
    script = f"MODEL = {str(demo_model_path())!r}\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
