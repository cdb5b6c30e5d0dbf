"""The tool that trains heads: chains are what drafting sees, layouts are the published ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[3]))

from safetensors.torch import load_file  # noqa: E402

from tools.draft_heads import train as tool  # noqa: E402
from tools.draft_heads.heads import Eagle, Eagle3, Medusa, Shape, Target, acceptance  # noqa: E402

DEMO = Path(__file__).parents[3] / "python" / "llmserve" / "demo" / "model"
SHAPE = Shape(
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=20,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
)


def read(length: int = 9) -> Target:
    torch.manual_seed(1)
    size = SHAPE.hidden_size
    return Target(
        ids=torch.randint(SHAPE.vocab_size, (2, length)),
        embeddings=torch.randn(2, length, size),
        entering=tuple(torch.randn(2, length, size) for _ in range(3)),
        hidden=torch.randn(2, length, size),
        logits=torch.randn(2, length, SHAPE.vocab_size),
    )


def test_a_later_pass_of_eagle_3_is_what_a_drafter_computes_one_token_at_a_time() -> None:
    target = read()
    head = Eagle3(SHAPE, torch.arange(3, 15))
    passes = head.passes(target, 3)
    for index in (0, 4, 5):
        features = head.fc(torch.cat(target.entering, -1))[:, : index + 1]
        for s in range(3):
            # The certain features, then the drafter's own outputs, in one plain causal pass.
            embeddings = target.embeddings[:, 1 : index + s + 2]
            out = head.midlayer(embeddings, features, [])[:, -1:]
            torch.testing.assert_close(
                head.lm_head(head.norm(out))[:, 0], passes[s][:, index], rtol=1e-4, atol=1e-5
            )
            features = torch.cat([features, out], 1)


def test_a_later_pass_of_eagle_is_what_a_drafter_computes_one_token_at_a_time() -> None:
    target = read()
    head = Eagle(SHAPE, torch.randn(SHAPE.vocab_size, SHAPE.hidden_size))
    passes = head.features(target, 3)
    features = target.hidden[:, :4]
    for s in range(3):
        read_in = head.fc(torch.cat([target.embeddings[:, 1 : s + 5], features], -1))
        out = head.layers[0](read_in, [])[:, -1:]
        torch.testing.assert_close(out[:, 0], passes[s][:, 3], rtol=1e-4, atol=1e-5)
        features = torch.cat([features, out], 1)


def test_acceptance_counts_drafts_whose_predecessors_were_right() -> None:
    target = read()
    choices = target.logits.argmax(-1)
    target.ids[:, 1:] = choices[:, :-1]  # a text that the target itself would write

    class Told(torch.nn.Module):
        def drafted(self, target: Target, num_passes: int) -> list[torch.Tensor]:
            right = [choices[:, 1 + s :].clone() for s in range(num_passes)]
            right[1][:, ::2] = -1
            return right

    first, second, third = acceptance(Told(), target, 3)
    assert (first, third) == (1, 1)
    assert second == pytest.approx(3 / 7)  # every other one of seven places is wrong


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
def test_a_training_writes_the_published_layout_and_goes_on_where_it_stopped(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The fox ran to the river. " * 60, encoding="utf-8")
    monkeypatch.setattr(tool, "CHECKPOINT_EVERY", 1)

    def run(work: str, out: str, steps: int) -> None:
        tool.main(
            f"--target {DEMO} --method {method} --text {text} --work {tmp_path / work}"
            f" --out {tmp_path / out} --steps {steps} --batch 2 --window 24 --passes 2"
            " --draft-vocab 64 --threads 1".split()
        )

    run("once", "head", 2)
    name = "medusa_lm_head.safetensors" if method == "medusa" else "model.safetensors"
    tensors = load_file(tmp_path / "head" / name)
    config = json.loads((tmp_path / "head" / "config.json").read_text("utf-8"))
    shapes = {key: tuple(x.shape) for key, x in tensors.items()}
    if method == "eagle3":
        assert shapes["fc.weight"] == (256, 768)
        assert shapes["midlayer.self_attn.k_proj.weight"] == (64, 512)
        assert (shapes["lm_head.weight"], shapes["t2d"]) == ((64, 256), (2048,))
        ids = tensors["d2t"] + torch.arange(64)
        assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
        layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert layers == [1, 2, 4]
    elif method == "eagle":
        assert shapes["fc.weight"] == (256, 512)
        assert shapes["fc.bias"] == (256,)
        assert not any("input_layernorm" in key or "head" in key for key in shapes)
    else:
        assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
        assert shapes["0.0.linear.weight"] == (256, 256)
        assert shapes["1.1.weight"] == (2048, 256)

    # The second run is killed behind its first step and started again.
    real, calls = torch.save, []

    def save_once(*args: object) -> None:
        real(*args)
        calls.append(args)
        if len(calls) == 1:
            Path(str(args[1])).replace(tmp_path / "again" / f"{method}.pt")
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", save_once)
    with pytest.raises(KeyboardInterrupt):
        run("again", "second", 2)
    run("again", "second", 2)
    second = load_file(tmp_path / "second" / name)
    assert all(torch.equal(x, second[key]) for key, x in tensors.items())


def test_medusa_heads_begin_as_the_targets_own() -> None:
    own = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)
    target = read()
    head = Medusa(SHAPE, own, num_heads=2)
    first = (target.hidden[:, :-1] @ own.T).argmax(-1)
    assert torch.equal(head.drafted(target, 2)[0], first)
