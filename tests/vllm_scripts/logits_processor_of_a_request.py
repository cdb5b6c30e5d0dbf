"""A function a request, made by a class of the engine."""

from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.logger import init_logger
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

logger = init_logger(__name__)


class OfOneRequest:
    def __init__(self, target_token: int) -> None:
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token if len(output_ids) < 2 else 5] = kept
        return logits


class Wrapped(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target: Any | None = params.extra_args and params.extra_args.get("target_token")
        if target is None:
            return None
        if not isinstance(target, int):
            logger.warning("target_token %s is not an int", target)
            return None
        return OfOneRequest(target)


llm = LLM(model="org/model", logits_processors=[Wrapped])
params = SamplingParams(temperature=0.0, max_tokens=4, extra_args={"target_token": 67})
(output,) = llm.generate("The fox", params)
assert output.outputs[0].token_ids == [67, 67, 5, 5]
