"""`KVCache`: the planes of every attention layer and the block table, allocated once from a `KVCacheShape`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pocketllm.cache.formats.base import KVFormat
from pocketllm.cache.pages import PagedPool, PageEdits, PageTable, SlotPages
from pocketllm.kernels.types import KeyBias, LayerKV, TensorSpec


@dataclass(frozen=True)
class KVCacheShape:
    """Sizes of one rank's KV cache. num_kv_heads counts this rank's heads; num_pages leaves out the spare page."""

    kv_format: KVFormat
    layout: str  # "paged" or "slots"
    num_layers: int
    num_slots: int
    num_pages: int
    max_pages: int  # of one slot
    page_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def max_context(self) -> int:
        return self.max_pages * self.page_size

    def layer_specs(self) -> tuple[TensorSpec, ...]:
        """The planes of one layer, with the spare page at the end."""
        return tuple(
            TensorSpec(p.name, (self.num_pages + 1, self.page_size, self.num_kv_heads, p.width), p.dtype)
            for p in self.kv_format.planes(self.head_dim)
        )

    def block_table_spec(self) -> TensorSpec:
        return TensorSpec("block_table", (self.num_slots + 1, self.max_pages), torch.int32)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * self.page_size * self.num_kv_heads * self.kv_format.bytes_per_token(self.head_dim)

    @property
    def nbytes(self) -> int:
        return self.num_layers * sum(s.nbytes for s in self.layer_specs()) + self.block_table_spec().nbytes

    def page_table(self) -> PageTable:
        if self.layout == "slots":
            return SlotPages(self.num_slots, self.max_pages, self.page_size)
        return PagedPool(self.num_slots, self.num_pages, self.max_pages, self.page_size)


class KVCache:
    """KV storage of one rank. Knows pages and slots, not requests; the page table decides, `apply` obeys."""

    def __init__(
        self, shape: KVCacheShape, device: torch.device, key_biases: list[KeyBias | None] | None = None
    ) -> None:
        """key_biases: one per layer, for formats that drop the K bias (None: the layer has none)."""
        self.shape = shape
        table = shape.block_table_spec()
        self.block_table = torch.full(table.shape, shape.num_pages, dtype=table.dtype, device=device)
        if shape.layout == "slots":
            pages = torch.arange(shape.num_slots * shape.max_pages, dtype=torch.int32)
            self.block_table[:-1] = pages.view(shape.num_slots, shape.max_pages)
        self.layers: list[LayerKV] = []
        for bias in key_biases or [None] * shape.num_layers:
            planes = tuple(torch.zeros(s.shape, dtype=s.dtype, device=device) for s in shape.layer_specs())
            self.layers.append(LayerKV(planes, self.block_table, shape.kv_format, shape.head_dim, bias))

    @property
    def nbytes(self) -> int:
        return self.block_table.nbytes + sum(plane.nbytes for layer in self.layers for plane in layer.planes)

    def apply(self, edits: PageEdits) -> None:
        """Set block table entries and copy pages, in every layer."""
        if edits.entries:
            slots, indices, pages = (torch.tensor(column) for column in zip(*edits.entries, strict=True))
            self.block_table[slots, indices] = pages.to(self.block_table)
        if edits.copies:
            source, target = (torch.tensor(column) for column in zip(*edits.copies, strict=True))
            for layer in self.layers:
                for plane in layer.planes:
                    raw = plane.view(torch.uint8)  # bytes: index operations know no 8-bit floats
                    raw[target] = raw[source]
