"""The kinds of files that are mutated: good ones to begin with, and what is done with a load.

What a load must refuse, whatever else it takes, is made by `nonsense` of a kind.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz import mutators
from fuzz.mutators import Mutate

# Characters of a prompt that is tokenized, which takes a microsecond each.
_MAX_PROMPT = 10**5
_TEXTS = ("hello world", "naïve 日本語 😀\n\n  x", "<|end|>a</s>", "e" * 200, "")


@dataclass(frozen=True)
class Kind:
    """A file of a good checkpoint, how it is mutated, and how the checkpoint is loaded."""

    file: str
    mutate: Mutate
    load: Callable[[Path], None]
    # Changes that no load may take; none: any mutation may be a good file, too.
    nonsense: Mutate | None = None


def _load_model(directory: Path) -> None:
    """Made, and two tokens of it."""
    from llmserve import LLM, SamplingParams

    ggufs = sorted(directory.glob("*.gguf"))
    with LLM(
        ggufs[0] if ggufs else directory,
        dtype="float32",
        num_threads=1,
        max_model_len=16,
        num_gpu_blocks_override=4,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=2)
        llm.generate([{"prompt_token_ids": [1, 0]}], params, use_tqdm=False)


def _load_tokenizer(directory: Path) -> None:
    """Texts there and back."""
    from llmserve.tokenization.eos_token import read_eos_token_id
    from llmserve.tokenization.length_bound import LengthBound
    from llmserve.tokenization.tokenizer import Tokenizer

    path = next(iter(sorted(directory.glob("*.gguf"))), directory)
    read_eos_token_id(path)
    tokenizer = Tokenizer.from_path(path)
    if tokenizer is None:
        return
    bound = LengthBound(tokenizer)
    for text in _TEXTS:
        ids = tokenizer.encode(text)
        assert all(0 <= token_id < tokenizer.num_tokens for token_id in ids)
        assert bound.min_num_tokens(text) <= len(ids)
        tokenizer.decode(ids)
        assert isinstance(tokenizer.encode_batch([text] * 2), list)
    for token_id in range(0, tokenizer.num_tokens, 37):
        tokenizer.token_text(token_id)
    assert tokenizer.kind


def _load_template(directory: Path) -> None:
    """A conversation of each form."""
    from llmserve.errors import InvalidArgument
    from llmserve.tokenization.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    user = {"role": "user", "content": "hello"}
    for conversation in ([user], [user, {"role": "assistant", "content": "a"}, user]):
        try:
            text = tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False
            )
            assert isinstance(text, str)
            if len(text) <= _MAX_PROMPT:
                tokenizer.encode_chat([text])
        except InvalidArgument as error:
            raise Refused(str(error)) from error


class Refused(Exception):
    """A file that is refused when it is first used."""


def _load_generation_config(directory: Path) -> None:
    from llmserve.requests.generation_config import read_generation_config

    read_generation_config(directory)


def _edit(change: Callable[[random.Random, dict[str, Any]], None]) -> Mutate:
    def mutate(rng: random.Random, data: bytes) -> bytes:
        fields = json.loads(data)
        change(rng, fields)
        return json.dumps(fields).encode()

    return mutate


def _wrong_config(rng: random.Random, config: dict[str, Any]) -> None:
    """Another model than the weights', or none."""
    field = rng.choice(
        ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "dtype", "experts"]
    )
    if field == "dtype":
        config.pop("torch_dtype", None)
        config["dtype"] = rng.choice(["", "float", "bfloat17", "x" * 100]) + "?"
    elif field == "experts":
        name = rng.choice(["num_experts", "num_local_experts", "n_routed_experts"])
        config[name] = rng.randint(2, 300)
    else:
        config[field] += rng.choice([-1, 1, 8, config[field]])


def _wrong_quantization(rng: random.Random, config: dict[str, Any]) -> None:
    """A method that is none, or parameters that are not the tensors'."""
    field, values = rng.choice(
        [
            ("quant_method", ["hqq", "", 7, None, "gptq "]),
            ("bits", [0, 3, 8, 5, -4, "4", 2**70]),
            ("group_size", [-2, 16, 64, 1.5, 2**60]),
            ("dynamic", [7, {"+:(": {}}, {"-:(?=x)": {}}, {"+:.*": {"bits": 8}}]),
            ("checkpoint_format", ["marlin", 2, "x" * 5000]),
        ]
    )
    config["quantization_config"][field] = rng.choice(values)


def _wrong_sampling(rng: random.Random, fields: dict[str, Any]) -> None:
    field, values = rng.choice(
        [
            ("temperature", [-1, "hot", [1], 1e400]),
            ("top_p", [0, 1.5, -0.1, "x"]),
            ("eos_token_id", [-5, 1.5, "</s>", [[2]], 2**40]),
            ("max_new_tokens", [0, -1, "all", 0.5]),
        ]
    )
    fields[field] = rng.choice(values)


def _wrong_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A weight that is no number, or a tensor of another name or shape."""
    (length,) = struct.unpack_from("<Q", data)
    header, values = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    name = rng.choice([name for name in header if name != "__metadata__"])
    entry = header[name]
    choice = rng.randrange(3)
    if choice == 0:
        at = rng.randrange(*entry["data_offsets"]) // 4 * 4
        values[at : at + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"))))
    elif choice == 1:
        header[name + rng.choice(["2", ".x", ".97.weight"])] = header.pop(name)
    else:
        entry["shape"] = [*entry["shape"], 1]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(values)


def _wrong_sentencepiece(rng: random.Random, data: bytes) -> bytes:
    """A score that is no number, or a piece that comes twice."""
    at = [found.start() for found in re.finditer(rb"\x15.{4}\x18", data, re.DOTALL)]
    if rng.random() < 0.5 and at:
        place = rng.choice(at) + 1
        return data[:place] + struct.pack("<f", float("nan")) + data[place + 4 :]
    pieces = re.findall(rb"\n[\x08-\x20]\n[\x01-\x18][\x20-\x7e]+\x15.{4}", data, re.DOTALL)
    piece = rng.choice(pieces)
    return piece + piece + data


def _wrong_lines(rng: random.Random, data: bytes) -> bytes:
    """A tiktoken file with one rank twice, a byte without a token, a rank that is none."""
    lines = data.rstrip(b"\n").split(b"\n")
    at = rng.randrange(256)
    choice = rng.randrange(3)
    if choice == 0:
        lines[at] = lines[at].split(b" ")[0] + b" " + lines[at - 1].split(b" ")[1]
    elif choice == 1:
        del lines[at]
    else:
        lines[at] = lines[at].split(b" ")[0] + rng.choice([b"", b" -1", b" 1.5", b" x"])
    return b"\n".join(lines)


KINDS: dict[str, Kind] = {
    "config": Kind("config.json", mutators.mutate_json, _load_model, _edit(_wrong_config)),
    "safetensors": Kind(
        "model.safetensors", mutators.mutate_safetensors, _load_model, _wrong_safetensors
    ),
    "quantization-config": Kind(
        "config.json", mutators.mutate_json, _load_model, _edit(_wrong_quantization)
    ),
    **{
        name: Kind("model.safetensors", mutators.mutate_safetensors, _load_model)
        for name in ("gptq", "awq", "compressed-tensors", "fp8", "modelopt", "bitsandbytes")
    },
    "mxfp4": Kind("model.safetensors", mutators.mutate_safetensors, _load_model),
    "index": Kind("model.safetensors.index.json", mutators.mutate_json, _load_model),
    "params": Kind("params.json", mutators.mutate_json, _load_model),
    "gguf": Kind("model.gguf", mutators.mutate_gguf, _load_model),
    "gguf-scales": Kind("model.gguf", mutators.mutate_gguf, _load_model),
    "gguf-pieces": Kind("model.gguf", mutators.mutate_gguf, _load_tokenizer),
    "byte-level": Kind("tokenizer.json", mutators.mutate_json, _load_tokenizer),
    "sentence-piece": Kind("tokenizer.json", mutators.mutate_json, _load_tokenizer),
    "unigram": Kind("tokenizer.json", mutators.mutate_json, _load_tokenizer),
    "word-piece": Kind("tokenizer.json", mutators.mutate_json, _load_tokenizer),
    "sentencepiece-bpe": Kind(
        "tokenizer.model", mutators.mutate_sentencepiece, _load_tokenizer, _wrong_sentencepiece
    ),
    "sentencepiece-unigram": Kind(
        "tokenizer.model", mutators.mutate_sentencepiece, _load_tokenizer, _wrong_sentencepiece
    ),
    "tiktoken": Kind("qwen.tiktoken", mutators.mutate_lines, _load_tokenizer, _wrong_lines),
    "tekken": Kind("tekken.json", mutators.mutate_json, _load_tokenizer),
    "vocab": Kind("vocab.json", mutators.mutate_json, _load_tokenizer),
    "merges": Kind("merges.txt", mutators.mutate_lines, _load_tokenizer),
    "tokenizer-config": Kind("tokenizer_config.json", mutators.mutate_json, _load_template),
    "special-tokens": Kind("special_tokens_map.json", mutators.mutate_json, _load_template),
    "chat-template": Kind("chat_template.jinja", mutators.mutate_template, _load_template),
    "generation-config": Kind(
        "generation_config.json",
        mutators.mutate_json,
        _load_generation_config,
        _edit(_wrong_sampling),
    ),
}


def write_seeds(directory: Path) -> None:
    """A good checkpoint a kind, in a folder of its name."""
    # Libraries that the workers do without.
    import base64
    import io

    import gguf
    import numpy
    import quantized_files
    import sentencepiece
    import tokenizer_files
    from checkpoints import checkpoint, make_checkpoint
    from gguf_files import add_bpe, in_format, write_gguf
    from tokenizers import normalizers

    def folder(kind: str) -> Path:
        (directory / kind).mkdir(parents=True)
        return directory / kind

    def trained(**options: Any) -> bytes:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(tokenizer_files.TEXTS * 3),
            model_writer=model,
            vocab_size=340,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        return model.getvalue()

    llama = checkpoint("llama")
    for kind in ("config", "safetensors"):
        shutil.copytree(llama, directory / kind)
    wide = checkpoint("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    dynamic = {"+:.*[.]mlp[.]": {"bits": 4}, "-:^lm_head$": {}}
    layouts = {
        "quantization-config": quantized_files.gptq(4, 32, dynamic=dynamic),
        "gptq": quantized_files.gptq(3, 32, symmetric=False, shuffled=True),
        "awq": quantized_files.awq(),
        "compressed-tensors": quantized_files.packed(4, symmetric=False),
        "fp8": quantized_files.fp8((32, 32)),
        "modelopt": quantized_files.nvfp4(modelopt=True),
        "bitsandbytes": quantized_files.bitsandbytes_4bit(double=True),
    }
    for kind, layout in layouts.items():
        quantized, _ = quantized_files.write_pair(wide, directory / "pairs" / kind, layout)
        shutil.copytree(quantized, directory / kind)
    fused, _ = quantized_files.write_fused_pair(
        checkpoint("gpt_oss", hidden_size=32),
        directory / "pairs" / "mxfp4",
        {"quant_method": "mxfp4"},
        quantized_files.fused_mxfp4,
        transposed=True,
    )
    shutil.copytree(fused, directory / "mxfp4")
    shutil.rmtree(directory / "pairs")
    make_checkpoint(folder("index"), "llama", max_shard_size="40KB")
    _write_mistral(llama, folder("params"))
    add = lambda writer: add_bpe(writer, tokenizer_files.byte_level(300), "gpt-2")  # noqa: E731
    write_gguf(folder("gguf") / "model.gguf", llama, extra=add)
    scales = {"blk.0.attn_q.scale": numpy.float32([0.5]), "blk.1.ffn_up.scale": numpy.float32([2])}
    nvfp4 = in_format("NVFP4")
    write_gguf(folder("gguf-scales") / "model.gguf", wide, nvfp4, tensors=scales)
    _write_pieces(gguf.GGUFWriter(folder("gguf-pieces") / "model.gguf", "llama"), trained())
    for kind in ("byte-level", "sentence-piece", "word-piece"):
        made = getattr(tokenizer_files, kind.replace("-", "_"))()
        tokenizer_files.save(made, folder(kind))
    unigram = tokenizer_files.unigram()
    charsmap = _charsmap(trained())
    unigram.normalizer = normalizers.Precompiled(charsmap)
    tokenizer_files.save(unigram, folder("unigram"))
    for model_type in ("bpe", "unigram"):
        data = trained(model_type=model_type, byte_fallback=True, normalization_rule_name="nfkc")
        (folder(f"sentencepiece-{model_type}") / "tokenizer.model").write_bytes(data)
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"he", b"ll", b"hell", b"hello", b" w", b"    "]
    encoded = [base64.b64encode(token) for token in tokens]
    lines = b"".join(b"%s %d\n" % (text, rank) for rank, text in enumerate(encoded))
    (folder("tiktoken") / "qwen.tiktoken").write_bytes(lines)
    added = {str(300 + i): {"content": f"<{i}>", "special": True} for i in range(3)}
    config = {"added_tokens_decoder": added, "bos_token": "<0>", "eos_token": {"content": "<1>"}}
    config["chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (directory / "tiktoken" / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copytree(directory / "tiktoken", directory / "tokenizer-config")
    vocab = [{"rank": i, "token_bytes": text.decode()} for i, text in enumerate(encoded)]
    tekken = {
        "config": {
            "pattern": r"[^\s]+|\s+",
            "default_vocab_size": len(vocab) + 4,
            "default_num_special_tokens": 4,
        },
        "vocab": vocab,
        "special_tokens": [{"rank": 0, "token_str": "<unk>"}, {"rank": 1, "token_str": "<s>"}],
    }
    (folder("tekken") / "tekken.json").write_text(json.dumps(tekken))
    for kind in ("vocab", "merges"):
        tokenizer_files.byte_level().model.save(str(folder(kind)))
        (directory / kind / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"})
        )
    for kind in ("chat-template", "special-tokens"):
        tokenizer_files.save(tokenizer_files.byte_level(), folder(kind))
        (directory / kind / "chat_template.jinja").write_text(_TEMPLATE)
    special = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}, "unk_token": None}
    (directory / "special-tokens" / "special_tokens_map.json").write_text(json.dumps(special))
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [2, 3]}
    sampling |= {"max_new_tokens": 100, "do_sample": True}
    (folder("generation-config") / "generation_config.json").write_text(json.dumps(sampling))


_TEMPLATE = """{%- set ns = namespace(n=0) -%}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{{ bos_token }}{% endif %}
<|{{ message['role'] }}|>{{ message.content | trim }}{% set ns.n = ns.n + 1 %}<|end|>
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


def _charsmap(model: bytes) -> bytes:
    from llmserve.tokenization.sentencepiece_tokenizer import parse_sentencepiece

    return parse_sentencepiece(model, Path("trained")).charsmap


def _write_mistral(llama: Path, to: Path) -> None:
    """The model in Mistral's own layout."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((llama / "config.json").read_text())
    names = {
        "model.embed_tokens": "tok_embeddings",
        "model.norm": "norm",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    tensors = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        for old, new in names.items():
            name = name.replace(old, new)
        tensors[name.removeprefix("model.")] = tensor
    save_file(tensors, to / "consolidated.safetensors")
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "rope_theta": 10000.0,
        "max_seq_len": 64,
    }
    if config.get("head_dim"):
        params["head_dim"] = config["head_dim"]
    (to / "params.json").write_text(json.dumps(params))


def _write_pieces(writer: Any, model: bytes) -> None:
    """A file of a vocabulary alone, of SentencePiece's unigram kind with its character map."""
    from llmserve.tokenization.sentencepiece_tokenizer import parse_sentencepiece

    parsed = parse_sentencepiece(model, Path("trained"))
    writer.add_tokenizer_model("t5")
    writer.add_token_list(parsed.pieces)
    writer.add_token_scores(parsed.scores)
    writer.add_token_types(parsed.types)
    writer.add_precompiled_charsmap(parsed.charsmap)
    writer.add_unk_token_id(parsed.unk_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
