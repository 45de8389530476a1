"""Writes the weights of a GGUF file again in other types, so that engines can be compared on files of one model.

    python benchmarks/requantize.py MODEL.gguf FOLDER [--types bf16,q8_0,q4_0]

Matrices are decoded to float32 and encoded by the gguf package. Embedding and output stay Q8_0 in the Q4_0 file, as the
usual files keep them finer than the rest; vectors stay float32. Metadata is copied. Nothing is gained by a finer type than
the source's: the files serve measurements of speed, and comparisons of engines on equal weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import LlamaFileType as FileType

TYPES = {
    "bf16": (Type.BF16, FileType.MOSTLY_BF16),
    "q8_0": (Type.Q8_0, FileType.MOSTLY_Q8_0),
    "q4_0": (Type.Q4_0, FileType.MOSTLY_Q4_0),
}
_FINER = {Type.Q4_0: Type.Q8_0}  # for the tensors named in _VOCABULARY
_VOCABULARY = ("token_embd.weight", "output.weight")


def target_type(name: str, shape: tuple[int, ...], wanted: Type) -> Type:
    """What a tensor becomes; shape is [..., K], K the dimension that is cut into blocks."""
    if len(shape) < 2:
        return Type.F32
    chosen = _FINER.get(wanted, wanted) if name in _VOCABULARY else wanted
    block, _ = gguf.GGML_QUANT_SIZES[chosen]
    if shape[-1] % block:
        raise SystemExit(
            f"{name} {list(shape)} can't be cut into blocks of {block}: leave {wanted.name} out of --types"
        )
    return chosen


def requantize(source: Path, target: Path, wanted: Type, file_type: FileType) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue  # the writer's own
        item = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], item)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        chosen = target_type(tensor.name, shape, wanted)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        writer.add_tensor(tensor.name, gguf.quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a GGUF file")
    parser.add_argument("folder", type=Path, help="where the new files go, named SOURCE-TYPE.gguf")
    parser.add_argument("--types", default=",".join(TYPES), help=f"of {', '.join(TYPES)}")
    args = parser.parse_args(argv)
    names = args.types.split(",")
    if unknown := [name for name in names if name not in TYPES]:
        parser.error(f"--types {unknown[0]!r}: choose of {', '.join(TYPES)}")
    for name in names:
        target = args.folder / f"{args.source.stem}-{name}.gguf"
        if target.exists():
            parser.error(f"{target} exists")
        requantize(args.source, target, *TYPES[name])
        print(f"{target}  {target.stat().st_size / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
