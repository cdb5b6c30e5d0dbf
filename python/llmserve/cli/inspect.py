"""`llmserve inspect`: what a checkpoint holds and what it will take, before anything is loaded."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from llmserve import _core
from llmserve.checkpoint.draft_folders import read_draft_folder
from llmserve.checkpoint.model_files import find_checkpoint, text_source
from llmserve.cli.inspect_text import text_report
from llmserve.cli.model_argument import add_model_argument, model_of
from llmserve.common.units import human_bytes
from llmserve.errors import NotSupported
from llmserve.options.engine_options import options_of
from llmserve.options.flags import add_flags
from llmserve.plan.memory_plan import QuantizedWeights

_EXAMPLES = """examples:
  llmserve inspect ./Qwen3-0.6B
  llmserve inspect --dtype float32 --json ./Qwen3-0.6B
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds and takes",
        description="Shows architecture, sizes by group, KV-cache bytes a token, tensors, "
        "tokenizer, chat templates and sampling defaults of a checkpoint, without loading it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_model_argument(parser)
    add_flags(parser, options_of("inspect"))
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    checkpoint = find_checkpoint(model_of(options), options.revision)
    if (method := read_draft_folder(checkpoint).method) != "draft_model":
        raise NotSupported(
            f"{checkpoint} holds a head for method {method!r}, which guesses for another model; "
            "what it takes beside that one says: llmserve plan MODEL --speculative-config "
            f"""'{{"model": "{checkpoint}"}}'"""
        )
    report = _core.inspect_checkpoint(
        str(checkpoint),
        dtype=options.dtype or "auto",
        quantization=options.quantization or "",
        kv_cache_dtype=options.kv_cache_dtype or "auto",
    )
    report["text"] = text_report(text_source(checkpoint))
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    for line in _lines(report):
        print(line)
    if options.tensors:
        for line in _tensor_lines(report["tensors"]):
            print(line)
    return 0


def _lines(report: dict[str, Any]) -> Iterator[str]:
    config, plan = report["config"], report["plan"]
    within = f", the text part of {config['text_part_of']}" if config["text_part_of"] else ""
    yield (
        f"architecture   {config['architecture']}{within}, {report['format']}, "
        f"{config['stored_dtype']}"
    )
    yield (
        f"shape          {config['num_layers']} layers, model {config['hidden_size']}, "
        f"FFN {config['intermediate_size']}, vocabulary {config['vocab_size']}"
    )
    latent = config["latent"]
    shared = (
        f"latents of {latent['rank']} and keys of {latent['rotary_dim']} for all"
        if latent
        else f"{config['num_kv_heads']} KV heads, head dim {config['head_dim']}"
    )
    yield f"attention      {config['num_heads']} heads, {shared}, RoPE {_rope(config)}"
    yield f"context        {config['max_model_len']} tokens"
    yield (
        f"files          {report['num_files']} with {len(report['tensors'])} tensors, "
        f"{human_bytes(report['file_bytes'])}"
    )
    kept = " and ".join([*plan["integers"], plan["dtype"]])
    yield f"in memory      {human_bytes(plan['total_bytes'])} of weights in {kept}"
    for use in plan["quantized"]:
        yield f"quantized      {QuantizedWeights(**use)}"
    for note in plan["notes"]:
        yield f"note           {note}"
    for name, num_bytes in plan["group_bytes"].items():
        if num_bytes == 0 and name == "experts":
            continue
        yield f"  {name:<12} {human_bytes(num_bytes)}"
    yield (
        f"KV cache       {plan['kv_bytes_per_token']} bytes a token in {plan['kv_cache_dtype']}, "
        f"{human_bytes(plan['kv_bytes_per_token'] * config['max_model_len'])} a full context"
    )
    yield f"workspace      {human_bytes(plan['workspace_bytes'])}"
    if plan["unused_tensors"]:
        yield f"unused         {', '.join(plan['unused_tensors'])}"
    yield from _text_lines(report["text"])


def _rope(config: dict[str, Any]) -> str:
    """The kinds of rotary embeddings that the layers have."""
    return " and ".join(dict.fromkeys(rope["type"] for rope in config["ropes"])) or "none"


def _text_lines(text: dict[str, Any]) -> Iterator[str]:
    yield f"tokenizer      {text['tokenizer'] or 'none: prompts are token ids'}"
    templates = ", ".join(text["chat_templates"])
    yield f"chat template  {templates or 'none: no llmserve chat'}"
    defaults = ", ".join(f"{name}={value}" for name, value in text["sampling_defaults"].items())
    yield f"sampling       {defaults or 'no defaults of its own'}"
    yield f"ends at        {', '.join(map(repr, text['eos_tokens'])) or 'no id of its own'}"


def _tensor_lines(tensors: list[dict[str, Any]]) -> Iterator[str]:
    width = max((len(tensor["name"]) for tensor in tensors), default=0)
    for tensor in tensors:
        shape = str(tensor["shape"])
        yield (
            f"{tensor['name']:<{width}}  {tensor['dtype']:<9} {shape:<16} "
            f"{human_bytes(tensor['num_bytes']):>10}  {tensor['file']}"
        )
