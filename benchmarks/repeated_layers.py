"""A GGUF file of more layers, copies of another's: `repeated_layers.py FROM TO NUM_LAYERS`.
Runs in an environment with the gguf package.

Drawing and quantizing few layers takes minutes, and all of a large model hours. Each copy has its
own place in the file, and so in memory. llama.cpp's mixtures give some layers more bits: a layer is
a copy of one that has as many as it would have.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gguf


def main() -> None:
    source, target, num_layers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        is_count = name == f"{arch}.block_count"
        value = num_layers if is_count else field.contents()
        kind = field.types[0]
        of_items = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=of_items)
    num_drawn = reader.fields[f"{arch}.block_count"].contents()
    dense = reader.fields.get(f"{arch}.leading_dense_block_count")
    num_dense = dense.contents() if dense else 0
    for tensor in reader.tensors:
        found = re.fullmatch(r"blk\.(\d+)\.(.*)", tensor.name)
        names = [tensor.name]
        if found:
            copies = [
                i
                for i in range(num_layers)
                if source_of(i, num_layers, num_drawn, num_dense) == int(found[1])
            ]
            names = [f"blk.{i}.{found[2]}" for i in copies]
        for name in names:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def source_of(layer_idx: int, num_layers: int, num_drawn: int, num_dense: int) -> int:
    """The drawn layer that a layer is a copy of."""
    if layer_idx < num_dense:
        return layer_idx
    wants = has_more_bits(layer_idx, num_layers)
    alike = (i for i in range(num_dense, num_drawn) if has_more_bits(i, num_drawn) == wants)
    return next(alike, num_drawn - 1)


def has_more_bits(layer_idx: int, num_layers: int) -> bool:
    """As llama.cpp's mixtures have it: the first and last eighths, and every third between."""
    eighth = num_layers // 8
    is_end = layer_idx < eighth or layer_idx >= 7 * num_layers // 8
    return is_end or (layer_idx - eighth) % 3 == 2


if __name__ == "__main__":
    main()
