"""Train a head that drafts for a model, and write it as others publish theirs.

    python -m tools.draft_heads.train --target python/llmserve/demo/model --method eagle3 \\
        --work build/eagle3 --out build/demo-eagle3
    python -m tools.draft_heads.train --target DIR --method medusa --text corpus.txt ...

The target is any causal language model that transformers loads; it is not changed. The text should
be of the kind that will be served, best of all what the target itself has written. An interrupted
run goes on from its last checkpoint when it is started again with the same --work.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from tqdm import tqdm

from .export import write_head
from .heads import Eagle, Eagle3, Medusa, acceptance
from .target import TargetModel, Windows, encode_text, most_frequent

CHECKPOINT_EVERY = 25  # steps
WARMUP = 0.05  # share of the steps
METHODS = ("eagle3", "eagle", "medusa")


def build(
    method: str, target: TargetModel, text: torch.Tensor, args: argparse.Namespace
) -> Eagle3 | Eagle | Medusa:
    """An untrained head, whose weights depend on the target, the text and a fixed seed."""
    torch.manual_seed(11)
    if method == "medusa":
        return Medusa(target.shape, target.head, args.passes)
    if method == "eagle":
        return Eagle(target.shape, target.head)
    count = min(args.draft_vocab, target.shape.vocab_size)
    return Eagle3(target.shape, most_frequent(text, target.shape.vocab_size, count))


def train(
    head: Eagle3 | Eagle | Medusa,
    target: TargetModel,
    windows: Windows,
    layers: tuple[int, ...],
    args: argparse.Namespace,
) -> float:
    """Train `head` in place to the end, from its checkpoint if there is one. Returns seconds."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95))
    checkpoint = args.work / f"{args.method}.pt"
    first, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        first, seconds = state["step"], state["seconds"]
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
    for step in (bar := tqdm(range(first, args.steps), initial=first, total=args.steps)):
        began = time.perf_counter()
        progress = step / args.steps
        factor = min(1.0, (progress + 1e-3) / WARMUP) * min(1.0, 2 * (1 - progress))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * factor
        read = target.read(windows.batch(step, args.batch), layers)
        loss = head.loss(read, args.passes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - began
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == args.steps:
            part = checkpoint.with_suffix(".part")
            states = {"head": head.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states | {"step": step + 1, "seconds": seconds}, part)
            part.replace(checkpoint)
    return seconds


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="the model's folder, or its id")
    parser.add_argument("--method", choices=METHODS, default="eagle3")
    parser.add_argument("--text", type=Path, help="training text; without it the demo's corpus")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=12, help="windows a step")
    parser.add_argument("--window", type=int, default=256, help="tokens a window")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of text, at most")
    parser.add_argument("--passes", type=int, default=4, help="drafts that are trained in a row")
    parser.add_argument("--draft-vocab", type=int, default=32_000, help="of EAGLE-3")
    parser.add_argument("--layers", type=int, nargs=3, help="whose input EAGLE-3 reads")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--speculators", action="store_true", help="write a speculators folder")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)

    target = TargetModel(args.target)
    layers = tuple(args.layers) if args.layers else target.default_layers()
    if not all(0 <= layer < target.num_layers for layer in layers):
        parser.error(f"--layers: the target has layers 0 to {target.num_layers - 1}")
    if args.speculators and args.method != "eagle3":
        parser.error("--speculators: only for --method eagle3")
    text = encode_text(args.target, args.text, args.tokens)
    held_out = max(args.window + 1, len(text) // 50)
    head = build(args.method, target, text, args)
    windows = Windows(text[:-held_out], args.window)
    seconds = train(head, target, windows, layers, args)
    write_head(
        head,
        args.out,
        target.shape,
        target=args.target,
        layers=layers,
        max_positions=getattr(target.model.config, "max_position_embeddings", 2048),
        speculators=args.speculators,
        num_tokens=args.passes,
    )
    read = target.read(Windows(text[-held_out:], args.window).batch(0, 16), layers)
    rates = acceptance(head, read, args.passes)
    print(f"accepted on held-out text, by draft: {', '.join(f'{rate:.2f}' for rate in rates)}")
    report = {"method": args.method, "steps": args.steps, "seconds": seconds, "accepted": rates}
    (args.out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
