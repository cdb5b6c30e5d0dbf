"""Turns a model into OpenVINO's own format, in the environment that has openvino-genai and nncf.

    python openvino_model.py SOURCE FOLDER FORMAT

FORMAT is bfloat16, of SOURCE a GGUF file of float16, which OpenVINO computes in bf16 where the CPU
can; or int8 (a scale a row) or int4 (symmetric, a scale for 128 weights, embedding and head, too)
of SOURCE a folder that this made as bfloat16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import openvino
import openvino_genai

_MODEL = "openvino_model.xml"


def from_gguf(path: Path, folder: Path) -> None:
    """openvino-genai keeps what it has read beside the file."""
    link = folder / "model.gguf"
    link.symlink_to(path)
    schedule = openvino_genai.SchedulerConfig()
    schedule.cache_size = 1  # GB
    openvino_genai.ContinuousBatchingPipeline(
        str(link), schedule, "CPU", {"enable_save_ov_model": True}
    )
    link.unlink()


def compressed(source: Path, folder: Path, form: str) -> None:
    import nncf

    modes = nncf.CompressWeightsMode
    model = openvino.Core().read_model(source / _MODEL)
    if form == "int8":
        model = nncf.compress_weights(model, mode=modes.INT8_SYM)
    else:
        model = nncf.compress_weights(
            model, mode=modes.INT4_SYM, group_size=128, ratio=1.0, all_layers=True
        )
    openvino.save_model(model, folder / _MODEL)


def main() -> None:
    source, folder, form = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    folder.mkdir()
    if form == "bfloat16":
        from_gguf(source, folder)
    else:
        compressed(source, folder, form)
    # Without this file the end's token is -1, which openvino-genai refuses in every request.
    config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()
