"""Train the demo model and its draft, and write them into the package.

    python -m tools.demo_model.train --work build/demo_model
    python -m tools.demo_model.train --work build/demo_model --draft-alone

The draft is for speculative decoding: a tenth of the model, the same tokenizer, trained on what
the model says. --draft-alone trains one of the model that is in the package.

Everything is derived from fixed seeds; nothing is downloaded. An interrupted run goes on from
its last checkpoint when it is started again with the same --work. A quick trial:

    python -m tools.demo_model.train --work /tmp/trial --steps 50 --out /tmp/out
"""

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from .data import TokenStream, encode_documents
from .evaluate import (
    NUM_HELD_OUT,
    STORY_PROMPT,
    agreement,
    chat_prompt,
    held_out_windows,
    perplexity,
    sample,
)
from .export import Report, Training, save_weights, write_card
from .parallel import ParallelGradient
from .recipe import DRAFT, MAX_POSITIONS, TARGET, Recipe, build, next_token_loss
from .tokenizer import name_tokens, train_tokenizer

PACKAGE_DEMO = Path(__file__).parents[2] / "python" / "llmserve" / "demo"
CHECKPOINT_EVERY = 25  # steps; at most a minute of work is lost


@dataclass(frozen=True, slots=True)
class Job:
    """One training: what to train, on what, for how long, and where it is kept."""

    recipe: Recipe
    stream: TokenStream
    steps: int
    checkpoint: Path
    threads: int
    names: torch.Tensor | None = None  # tokens that are names: see recipe.next_token_loss
    teacher: LlamaForCausalLM | None = None
    loss: Callable[..., torch.Tensor] = next_token_loss


def train(job: Job, model: LlamaForCausalLM) -> Training:
    """Train `model` in place to the end of `job`, from its checkpoint if there is one."""
    optimizers = job.recipe.optimizers(model)
    first, seconds = 0, 0.0
    if job.checkpoint.exists():
        state = torch.load(job.checkpoint, weights_only=True)
        first, seconds = state["step"], state["seconds"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    loss_of = functools.partial(job.loss, teacher=job.teacher, names=job.names)
    model.train()
    gradient = ParallelGradient(model, job.threads)
    bar = tqdm(range(first, job.steps), initial=first, total=job.steps, desc=job.recipe.name)
    for step in bar:
        began = time.perf_counter()
        ids = job.recipe.batch(job.stream, step, job.steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * job.recipe.schedule(step / job.steps)
        loss = gradient.backward(ids, loss_of)
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.recipe.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - began
        bar.set_postfix(loss=f"{loss:.3f}")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == job.steps:
            _save(job.checkpoint, step + 1, seconds, model, optimizers)
    return Training(job.steps, job.steps * job.recipe.tokens_per_step, seconds)


def _save(
    path: Path,
    step: int,
    seconds: float,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
) -> None:
    """Write a checkpoint so that a crash leaves either the old one or the new one."""
    part = path.with_suffix(".part")
    states = [optimizer.state_dict() for optimizer in optimizers]
    state = {"step": step, "seconds": seconds, "model": model.state_dict(), "optimizers": states}
    torch.save(state, part)
    part.replace(path)


_QUESTIONS = (
    "Tell me a story about a brave fox.",
    "What is 17 + 8?",
    "Write a JSON record for a person named Mira who is 9 years old and lives in Oslo.",
    "Write a Python function that adds two numbers.",
    "Who is the baker of Lornwick?",
)
_ROLES = {
    "model": "The model that ships with llmserve, so that it can be tried without a download.",
    "draft": "The draft of the llmserve demo model, for speculative decoding; same tokenizer.",
}


def finish(
    job: Job,
    model: LlamaForCausalLM,
    training: Training,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
) -> LlamaForCausalLM:
    """Write `model` to `out`, print and note its perplexity, and return it as it loads."""
    loaded = save_weights(model, tokenizer, out)
    value = perplexity(loaded, held_out_windows(tokenizer, NUM_HELD_OUT))
    print(
        f"{job.recipe.name}: held-out perplexity {value:.3f},"
        f" {loaded.num_parameters():,} parameters"
    )
    prompts = [STORY_PROMPT] + [chat_prompt(tokenizer, question) for question in _QUESTIONS]
    if job.teacher is not None:
        prompts = prompts[:1]
    samples = tuple(sample(loaded, tokenizer, text, seed) for seed, text in enumerate(prompts))
    name = job.recipe.name
    report = Report(name, _ROLES[name], training, value, NUM_HELD_OUT, samples)
    write_card(out, loaded, report)
    return loaded


def main() -> None:
    """Train what is not trained yet and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=PACKAGE_DEMO, help="folder for the model's")
    parser.add_argument("--steps", type=int, default=1600, help="steps of the model")
    parser.add_argument("--draft-alone", action="store_true", help="of the model in --out")
    parser.add_argument("--draft-steps", type=int, default=500, help="steps of the draft")
    parser.add_argument("--tokens", type=int, default=3_000_000, help="tokens of the corpus")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(MAX_POSITIONS)
    stream = encode_documents(tokenizer, args.tokens, args.work / "tokens.npy")
    names = name_tokens(tokenizer)
    if args.draft_alone:
        shipped = LlamaForCausalLM.from_pretrained(args.out / "model", dtype=torch.float32)
        target = shipped.eval()
    else:
        job = Job(TARGET, stream, args.steps, args.work / "model.pt", args.threads, names)
        model = build(TARGET)
        target = finish(job, model, train(job, model), tokenizer, args.out / "model")
    checkpoint = args.work / "draft.pt"
    job = Job(DRAFT, stream, args.draft_steps, checkpoint, args.threads, names, target)
    model = build(DRAFT)
    draft = finish(job, model, train(job, model), tokenizer, args.out / "draft")
    share = agreement(draft, target, held_out_windows(tokenizer, NUM_HELD_OUT))
    print(f"draft and model agree on the next token at {share:.1%} of the positions")


if __name__ == "__main__":
    main()
