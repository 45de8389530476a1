"""A value that is no number must be seen: whoever reads its token gets none either, and the engine ends that request. Were
it stored as some number, a broken model would go on talking.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.cache.kv import KVCache, KVCacheShape
from pocketllm.cache.pages import PageEdits
from pocketllm.kernels import numba, reference, triton
from pocketllm.kernels.types import AttentionMask, LayerKV

SLOTS, TOKENS, PAGE, KV_HEADS, GROUP = 3, 70, 64, 1, 2
BACKENDS = {"reference": reference, "numba": numba, "triton": triton}


def device_of(backend: ModuleType) -> torch.device:
    return torch.device("cuda" if backend is triton and torch.cuda.is_available() else "cpu")


def storage(name: str, head_dim: int, device: torch.device) -> LayerKV:
    cache = KVCache(KVCacheShape(KV_FORMATS[name], "paged", 1, SLOTS, 2 * SLOTS, 2, PAGE, KV_HEADS, head_dim), device)
    cache.apply(PageEdits(entries=[(slot, page, 2 * slot + page) for slot in range(SLOTS) for page in range(2)]))
    return cache.layers[0]


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("head_dim", [48, 256])
def test_no_number_stays_none(backend: ModuleType, name: str, head_dim: int) -> None:
    """In K of slot 0 and V of slot 1, in first and last values (a rotation of 48 has three parts), and not in slot 2."""
    device = device_of(backend)
    kv = storage(name, head_dim, device)
    k, v = torch.randn(2, SLOTS * TOKENS, KV_HEADS, head_dim)
    k[1, 0, 0] = v[TOKENS + 4, 0, 0] = v[TOKENS + 66, 0, -1] = float("nan")
    slots, positions = torch.arange(SLOTS, dtype=torch.int32), torch.arange(TOKENS)
    token_slots = slots.repeat_interleave(TOKENS).to(device)
    backend.append(kv, k.to(device), v.to(device), token_slots, positions.repeat(SLOTS).to(device))
    for slot, broken in enumerate((([1], []), ([], [4, 66]), ([], []))):
        for stored, tokens in zip(backend.dequantize(kv, slot, TOKENS), broken, strict=True):
            assert stored.isnan().any(-1).any(-1).nonzero().flatten().tolist() == tokens
    q = torch.randn(SLOTS, 1, KV_HEADS * GROUP, head_dim, device=device)
    lens = torch.full((SLOTS,), TOKENS, dtype=torch.int32, device=device)
    out = backend.attend(kv, q, slots.to(device), lens, head_dim**-0.5, AttentionMask())
    assert out.isnan().any(-1).flatten(1).all(1).tolist() == [True, True, False]
    assert not out[2].isnan().any()
