"""Cutting a rank's shard out of a stored matrix, without decoding it."""

from __future__ import annotations

import torch
from torch import Tensor

from pocketllm.kernels.types import LinearWeight
from pocketllm.parallel import Part
from pocketllm.weights.formats import StoredFormat, stored_format


def check_cut(name: str, form: StoredFormat, rows: Part, columns: Part) -> None:
    """ValueError if the shard would part elements that share a scale."""
    for part, block, what in ((rows, form.row_block, "rows"), (columns, form.column_block, "columns")):
        edges = {edge for pair in part.ranges for edge in pair} - {part.total}
        if any(edge % block for edge in edges):
            raise ValueError(
                f"{name} is stored as {form.name}: shards of {part.size} of its {part.total} {what} "
                f"would part groups of {block} that share a scale"
            )


def cut(weight: LinearWeight, rows: Part, columns: Part) -> LinearWeight:
    """The shard [rows.size, columns.size] of a matrix without bias, in memory of its own; `check_cut` has passed."""
    if rows.is_whole and columns.is_whole:
        return weight
    form = stored_format(weight)
    unit = form.specs(form.row_block, form.column_block)  # the planes of one block that can't be parted
    planes = []
    for plane, spec in zip(weight.tensors, unit, strict=True):
        plane = _cut_dim(plane, 0, rows, form.row_block, spec.shape[0])
        planes.append(_cut_dim(plane, 1, columns, form.column_block, spec.shape[1]))
    return LinearWeight(form, (rows.size, columns.size), tuple(planes))


def _cut_dim(plane: Tensor, dim: int, part: Part, block: int, width: int) -> Tensor:
    """`part` of a plane's dimension that has `width` elements for each `block` of the matrix."""
    if part.is_whole:
        return plane
    raw = plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane  # torch can't join 8-bit floats
    pieces = []
    for start, stop in part.ranges:
        first = start // block * width
        last = min(-(-stop // block) * width, raw.shape[dim])  # the matrix may end inside a block
        pieces.append(raw.narrow(dim, first, last - first))
    return torch.cat(pieces, dim).view(plane.dtype)  # of one piece, too, a copy without gaps
