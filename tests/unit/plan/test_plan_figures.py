"""The calculators give the published figures, exactly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llmserve import InvalidArgument, NotSupported, _core
from llmserve.plan import (
    ModelShape,
    batch_for_rate,
    cost_per_million_tokens,
    crossover_ops_per_byte,
    decode_ops_per_byte,
    decode_tokens_per_s,
    hand_over_share,
    plan_capacity,
    plot_roofline,
    plot_users,
    roofline_flops,
    transfer_s,
)
from llmserve.plan.figures import Device, figures

GB = 10**9
GIB = 2**30
# 70 G parameters of two bytes; Llama-2-70B and Llama-3-70B have the same KV shape.
LLAMA_70B = ModelShape.of(80, 8, 128, weight_bytes=140 * GB)
H100_BANDWIDTH = 3.35e12
CONTEXT_BYTES = 1_342_177_280  # 4,096 tokens of it


def test_kv_bytes_of_llama_3_70b() -> None:
    assert LLAMA_70B.kv_bytes(1) == 327_680
    assert LLAMA_70B.kv_bytes(128 * 1024) == 42_949_672_960


def test_kv_bytes_of_llama_2_70b_at_4096_tokens() -> None:
    assert LLAMA_70B.kv_bytes(4096) == CONTEXT_BYTES


def test_kv_bytes_of_28_layers_of_4_heads_and_requests_in_60_gib() -> None:
    shape = ModelShape.of(28, 4, 128)
    assert shape.kv_bytes(4096) == 234_881_024
    assert plan_capacity(shape, 60 * GIB).num_users(4096) == 274


def test_users_of_llama_3_70b_on_four_cards() -> None:
    capacity = plan_capacity(LLAMA_70B, 4 * 80 * GIB, overhead=0.1)
    users = [capacity.num_users(4096, dtype) for dtype in ("float16", "bfloat16", "fp8", "int4")]
    assert users == [126, 126, 252, 504]


def test_users_come_in_whole_blocks() -> None:
    # A context of 4,097 tokens takes 257 blocks of 16: a sixteenth of a percent more.
    capacity = plan_capacity(LLAMA_70B, 180 * GB, (4096, 4097))
    block = 16 * 327_680
    assert capacity.rows[1].num_users == (40 * GB // block // 256, 40 * GB // block // 257)


def test_decode_bound_and_the_batch_for_a_thousand_tokens() -> None:
    assert round(decode_tokens_per_s(140e9, H100_BANDWIDTH), 1) == 23.9
    assert batch_for_rate(1000, 140e9, H100_BANDWIDTH) == 42
    assert batch_for_rate(1000, 140e9, H100_BANDWIDTH, CONTEXT_BYTES) == 70
    # The smallest that reaches it, by the bound itself.
    for batch, kv_bytes in ((42, 0), (70, CONTEXT_BYTES)):
        assert decode_tokens_per_s(140e9, H100_BANDWIDTH, batch, kv_bytes) >= 1000
        assert decode_tokens_per_s(140e9, H100_BANDWIDTH, batch - 1, kv_bytes) < 1000


def test_the_contexts_of_that_batch_do_not_fit_in_40_gb() -> None:
    assert plan_capacity(LLAMA_70B, 180 * GB).num_users(4096) == 29


def test_no_batch_reaches_what_the_kv_reads_forbid() -> None:
    with pytest.raises(InvalidArgument, match=r"no batch decodes 3000 tokens/s.*less than 2495\.9"):
        batch_for_rate(3000, 140e9, H100_BANDWIDTH, CONTEXT_BYTES)


def test_cost_of_a_million_tokens() -> None:
    assert round(cost_per_million_tokens(3.0, 2500), 2) == 0.33


def test_kv_hand_over() -> None:
    assert LLAMA_70B.kv_bytes(8192) == 2.5 * GIB
    assert round(transfer_s(2.5 * GIB, 200e9) * 1e3, 1) == 13.4


def test_handing_over_is_worth_it_where_the_link_is_quick_beside_the_prefill() -> None:
    assert round(hand_over_share(2**17, 10e9 / 8, 1000), 3) == 0.105
    assert round(hand_over_share(2**17, 1e9 / 8, 1000), 2) == 1.05
    for link, verdict in ((10e9 / 8, "prefill apart pays"), (1e9 / 8, "does not pay")):
        shape = ModelShape.of(32, 8, 128, weight_bytes=16 * GB)
        *_, last = figures(shape, Device(flops=16e12, link=link), (4096,), None)
        assert verdict in str(last)
    # Without the weights nobody knows how long the prefill takes.
    shape = ModelShape.of(32, 8, 128)
    assert len(figures(shape, Device(flops=16e12, link=1e9), (4096,), None)) == 1


def test_roofline_of_an_a100() -> None:
    flops, bandwidth = 312e12, 2e12
    assert crossover_ops_per_byte(flops, bandwidth) == 156
    assert roofline_flops(156, flops, bandwidth) == flops
    assert roofline_flops(78, flops, bandwidth) == flops / 2
    assert roofline_flops(1000, flops, bandwidth) == flops
    assert decode_ops_per_byte(156, 70e9, 140e9) == 156


def test_a_latent_cache_keeps_576_elements_a_token_and_layer() -> None:
    latent = ModelShape.of(61, 1, 512, value_dim=64)
    assert latent.kv_bytes(1) == 61 * 576 * 2


def test_eight_of_64_heads_cache_an_eighth() -> None:
    assert ModelShape.of(80, 64, 128).kv_bytes(100) == 8 * LLAMA_70B.kv_bytes(100)


def test_the_calculator_and_the_engine_share_their_arithmetic() -> None:
    for dtype in _core.kv_cache_dtypes():
        assert LLAMA_70B.kv_bytes(8, dtype.name) == 8 * 80 * 8 * 256 * dtype.bits // 8


CONFIGS: list[tuple[dict[str, object], int]] = [
    # fields, bytes a token in two bytes an element
    (
        {
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "hidden_size": 8192,
        },
        327_680,
    ),
    ({"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6}, 2 * 4 * 12 * 2),
    (
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        3 * 576 * 2,
    ),
    (
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "hidden_size": 64,
            "multi_query": True,
        },
        2 * 16 * 2,
    ),
    ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 12 * 128 * 2),
    (
        {"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}},
        2 * 16 * 2,
    ),
    # In a family's own spelling, and in spite of a field that the family does not read.
    (
        {
            "architectures": ["FalconForCausalLM"],
            "vocab_size": 65024,
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        60 * 8 * 128 * 2,
    ),
    (
        {
            "architectures": ["GPTNeoForCausalLM"],
            "vocab_size": 50257,
            "hidden_size": 2048,
            "num_layers": 24,
            "num_heads": 16,
            "num_key_value_heads": 1,
        },
        24 * 16 * 256 * 2,
    ),
]


@pytest.mark.parametrize(("fields", "want"), CONFIGS)
def test_a_shape_is_read_from_config_json(
    tmp_path: Path, fields: dict[str, object], want: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert ModelShape.from_config(tmp_path / "config.json").kv_bytes(1) == want
    assert ModelShape.from_config(tmp_path).kv_bytes(1) == want


def test_a_config_that_says_too_little_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(NotSupported, match="has no num_hidden_layers"):
        ModelShape.from_config(path)
    path.write_text('{"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64}')
    with pytest.raises(NotSupported, match="has no head_dim"):
        ModelShape.from_config(path)
    with pytest.raises(InvalidArgument, match="there is no"):
        ModelShape.from_config(tmp_path / "other.json")


BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ModelShape.of(0, 8, 128), InvalidArgument, "num_layers must be between 1"),
    (lambda: ModelShape.of(1, 8, 0), InvalidArgument, "head_dim must be between 1"),
    (lambda: LLAMA_70B.kv_bytes(1, "fp3"), NotSupported, 'KV cache dtype "fp3" is not known'),
    (lambda: LLAMA_70B.kv_bytes(-1), InvalidArgument, "num_tokens must be between 0"),
    (lambda: plan_capacity(LLAMA_70B, 0), InvalidArgument, "memory_bytes must be between 1"),
    (
        lambda: plan_capacity(LLAMA_70B, GB, overhead=1.0),
        InvalidArgument,
        r"overhead must be in \[0, 1\)",
    ),
    (
        lambda: plan_capacity(LLAMA_70B, GB, (0,)),
        InvalidArgument,
        "contexts must be between 1",
    ),
    (
        lambda: decode_tokens_per_s(0, 1),
        InvalidArgument,
        "weight_bytes must be finite and above 0",
    ),
    (lambda: transfer_s(1, float("nan")), InvalidArgument, "bandwidth must be finite"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_a_bad_number_is_refused(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_weights_that_do_not_fit_leave_no_users() -> None:
    capacity = plan_capacity(LLAMA_70B, 100 * GB)
    assert capacity.num_users(4096) == 0
    assert "none: 37.3 GiB too little" in str(capacity)


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    roofline = plot_roofline(312e12, 2e12, [("decode, 32 users", 32.0)])
    (line, *_) = roofline.get_lines()
    assert max(line.get_ydata()) == 312e12
    capacity = plan_capacity(LLAMA_70B, 4 * 80 * GIB, (4096, 8192), overhead=0.1)
    users = plot_users(capacity)
    assert [list(line.get_ydata()) for line in users.get_lines()][-1] == [504, 252]
    users.figure.savefig(tmp_path / "users.png")
    assert (tmp_path / "users.png").stat().st_size > 1000


def test_plots_name_the_extra_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NotSupported, match=r"pip install 'llmserve\[plot\]'"):
        plot_roofline(312e12, 2e12)
