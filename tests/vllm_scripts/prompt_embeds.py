"""Vectors in the place of tokens, from transformers' own embedding layer."""

import torch
import transformers
from vllm import LLM

model_name = "org/model"
tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
model = transformers.AutoModelForCausalLM.from_pretrained(model_name)
layer = model.get_input_embeddings()
token_ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
prompt_embeds = layer(token_ids).squeeze(0)
assert isinstance(prompt_embeds, torch.Tensor)
assert prompt_embeds.requires_grad
llm = LLM(model=model_name, enable_prompt_embeds=True)
outputs = llm.generate([{"prompt_embeds": prompt_embeds}, {"prompt_embeds": prompt_embeds}])
assert outputs[0].outputs[0].text
