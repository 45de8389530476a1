"""K8V4's V in small heads: what the Triton kernels store and read, against the format's definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from torch import Tensor

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.cache.kv import KVCache, KVCacheShape
from pocketllm.cache.pages import PageEdits
from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.types import LayerKV

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, HEADS = 60, 2


def storage(head_dim: int) -> LayerKV:
    shape = KVCacheShape(KV_FORMATS["turboquant_k8v4"], "paged", 1, 1, 4, 4, 16, HEADS, head_dim)
    cache = KVCache(shape, DEVICE)
    cache.apply(PageEdits(entries=[(0, i, 3 - i) for i in range(4)]))
    return cache.layers[0]


def rows(head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V [T, H, D]: of many sizes, one all zeros, one with a loud group, one with a single value."""
    torch.manual_seed(head_dim)
    k, v = torch.randn(2, TOKENS, HEADS, head_dim) * 10 ** torch.linspace(-5, 3, TOKENS)[:, None, None]
    v[1] = 0
    v[2, :, :4] *= 100
    v[3, :, 1:] = 0
    return k.to(DEVICE), v.to(DEVICE)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64])
def test_rows_are_stored_and_read_as_the_format_says(head_dim: int) -> None:
    k, v = rows(head_dim)
    slots = torch.zeros(TOKENS, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(TOKENS, device=DEVICE)
    kv, wanted = storage(head_dim), storage(head_dim)
    kernels.append(kv, k, v, slots, positions)
    reference.append(wanted, k, v, slots, positions)
    # Sums run in another order: two starts of a search may fit alike, a value may stand between two levels.
    words, wanted_words = kv.planes[3], wanted.planes[3]
    alike = (words == wanted_words).squeeze(-1)
    assert alike.float().mean() > 0.95
    codes, wanted_codes = kv.planes[1][alike].int(), wanted.planes[1][alike].int()
    assert (codes != wanted_codes).float().mean() < 0.01
    for half, wanted_half in ((codes & 15, wanted_codes & 15), (codes >> 4, wanted_codes >> 4)):
        assert (half - wanted_half).abs().max() <= 1
    got, defined = kernels.dequantize(kv, 0, TOKENS)[1], reference.dequantize(kv, 0, TOKENS)[1]
    off, size = (got - defined).norm(dim=-1), defined.norm(dim=-1)
    assert bool((off <= 1e-3 * size + 1e-9).all())
    loss = (got - v).norm(dim=-1) / v.norm(dim=-1).clamp_min(1e-9)
    assert loss[4:].max() < 0.11
