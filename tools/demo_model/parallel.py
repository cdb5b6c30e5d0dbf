"""Gradients of one batch on several threads, each with a replica of the model.

A barrier inside every matrix product stalls whenever another process takes a core; here threads
meet once a step. Each sums its own share in order, so that a run repeats exactly.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaForCausalLM

# Tokens that one thread takes through the model at once: 16 MB of logits stay near the cache.
MICRO_BATCH = 2048

Loss = Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]


class ParallelGradient:
    """Fills the gradients of `model`; owns the threads and the replicas."""

    def __init__(self, model: LlamaForCausalLM, num_threads: int) -> None:
        torch.set_num_threads(1)
        self.model = model
        self.pool = ThreadPoolExecutor(
            num_threads, initializer=torch.set_num_threads, initargs=(1,)
        )
        self.replicas = [copy.deepcopy(model) for _ in range(num_threads)]
        for replica in self.replicas:
            for mine, shared in zip(replica.parameters(), model.parameters(), strict=True):
                mine.data = shared.data

    def backward(self, ids: torch.Tensor, loss: Loss) -> float:
        """Set the gradients to those of the mean `loss` over `ids` [B, T] and return that mean."""
        rows = max(1, min(MICRO_BATCH // ids.shape[1], len(ids) // len(self.replicas)))
        parts = ids.split(rows)
        jobs = [
            self.pool.submit(_share, replica, parts[i :: len(self.replicas)], loss, len(parts))
            for i, replica in enumerate(self.replicas)
        ]
        total = sum(job.result() for job in jobs)
        grouped = zip(*(replica.parameters() for replica in self.replicas), strict=True)
        for target, sources in zip(self.model.parameters(), grouped, strict=True):
            grads = [source.grad for source in sources if source.grad is not None]
            target.grad = torch.stack(grads).sum(0)
        return total


def _share(
    replica: LlamaForCausalLM, parts: tuple[torch.Tensor, ...], loss: Loss, num_parts: int
) -> float:
    replica.zero_grad(set_to_none=True)
    total = 0.0
    for part in parts:
        value = loss(replica, part) / num_parts
        torch.autograd.backward(value)
        total += value.item()
    return total
