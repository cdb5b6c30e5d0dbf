"""A class that edits the logits of the batch, with an argument of each request."""

import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


class OnlyOne(LogitsProcessor):
    """Leaves one token."""

    @classmethod
    def validate_params(cls, params: SamplingParams):
        target = params.extra_args and params.extra_args.get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token {target!r} is not an int")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        if not batch_update:
            return
        for index, params, _, _ in batch_update.added:
            self.validate_params(params)
            target = params.extra_args and params.extra_args.get("target_token")
            if target is None:
                self.targets.pop(index, None)
            else:
                self.targets[index] = target
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for source, target, direction in batch_update.moved:
            moved = self.targets.pop(source, None)
            if direction == MoveDirectionality.SWAP:
                self.targets[source] = self.targets.pop(target)
            self.targets[target] = moved

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.targets:
            return logits
        columns = torch.tensor(list(self.targets.values()), dtype=torch.long, device=logits.device)
        rows = torch.tensor(list(self.targets), dtype=torch.long, device=logits.device)
        kept = logits[rows, columns].clone()
        logits[rows] = float("-inf")
        logits[rows, columns] = kept
        return logits


llm = LLM(model="org/model", logits_processors=[OnlyOne])
params = [
    SamplingParams(temperature=0.0, max_tokens=4, extra_args={"target_token": 128}),
    SamplingParams(temperature=0.0, max_tokens=4),
]
first, second = llm.generate(["The fox", "The fox"], params)
assert first.outputs[0].token_ids == [128] * 4
assert second.outputs[0].token_ids != [128] * 4
