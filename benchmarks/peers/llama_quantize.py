"""A GGUF file in another of llama.cpp's mixes of types: `llama_quantize.py FROM TO Q4_K_M`. Runs in
llama.cpp's environment."""

from __future__ import annotations

import sys

import llama_cpp


def main() -> None:
    source, target, mix = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    name = {"MXFP4": "MXFP4_MOE"}.get(mix, mix)  # experts in it, all else in Q8_0
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params) != 0:
        sys.exit(f"llama.cpp could not write {target}")


if __name__ == "__main__":
    main()
