"""Scores that rise along a slot: what has been added up must shrink again and again, in each row on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pocketllm.cache.formats.base import KVFormat
from pocketllm.kernels import reference
from pocketllm.kernels import triton as kernels
from test_triton_attention import DEVICE, EVERYTHING, FORMATS, GPU, LONG, error, every_format, ints, limit, make_kv

DIMS = [(256, 1, 6), (128, 2, 4)] if GPU else [(64, 1, 6)]  # dim, KV heads, query heads of each
PATHS = {
    "up": lambda t: -10 + 30 * t,
    "down": lambda t: 20 - 30 * t,
    "in steps": lambda t: 6 * (t * 5).floor() - 10,
    "late": lambda t: torch.where(t > 0.93, 18.0, 0.0),
}


def towards(direction: Tensor, path: str, tokens: int, heads: int) -> Tensor:
    """K [tokens, heads, D] whose score, of a query that is `direction`, goes along a path (in nats, before noise)."""
    t = PATHS[path](torch.arange(tokens, device=DEVICE) / tokens)
    return t[:, None, None] * direction + 0.3 * torch.randn(tokens, heads, len(direction), device=DEVICE)


@every_format
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("dim", "heads", "group"), DIMS)
def test_scores_that_rise(kv_format: KVFormat, path: str, dim: int, heads: int, group: int) -> None:
    lens = [LONG, 200]
    kv = make_kv(kv_format, lens, dim=dim, heads=heads)
    direction = torch.randn(dim, device=DEVICE)
    direction *= dim**0.25 / direction.norm()
    for slot, tokens in enumerate(lens):
        k, v = towards(direction, path, tokens, heads), torch.randn(tokens, heads, dim, device=DEVICE)
        reference.append(
            kv, k, v, torch.full((tokens,), slot, device=DEVICE).int(), torch.arange(tokens, device=DEVICE)
        )
    # Some rows rise as the path does, some against it, some hardly.
    factors = torch.tensor([1.0, -1.0, 0.05, 0.5, -0.3, 0.0], device=DEVICE).repeat(heads * group)[: heads * group]
    q = factors[:, None] * direction + 0.2 * torch.randn(2, 4, heads * group, dim, device=DEVICE)
    arguments = ints(0, 1), ints(*lens), dim**-0.5, EVERYTHING
    verified, wanted = kernels.attend(kv, q, *arguments), reference.attend(kv, q, *arguments)
    assert error(verified, wanted) < 2 * limit(kv_format)  # few tokens count, whose scores are large
    if GPU:
        last = kernels.attend(kv, q[:, -1:].contiguous(), *arguments)
        assert torch.equal(last, verified[:, -1:])


@pytest.mark.skipif(not GPU, reason="in the interpreter, NumPy sums in an order of its own")
@pytest.mark.parametrize("kv_format", [FORMATS[n] for n in ("fp8", "int8_per_token_head", "turboquant_k8v4", "bf16")])
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_row_that_rises_changes_no_bit_of_another(kv_format: KVFormat, q_len: int) -> None:
    dim, heads, group = 256, 1, 6
    kv = make_kv(kv_format, [LONG], dim=dim, heads=heads)
    direction = torch.randn(dim, device=DEVICE)
    direction *= dim**0.25 / direction.norm()
    k, v = towards(direction, "up", LONG, heads), torch.randn(LONG, heads, dim, device=DEVICE)
    reference.append(kv, k, v, torch.zeros(LONG, device=DEVICE).int(), torch.arange(LONG, device=DEVICE))
    quiet = 0.1 * torch.randn(1, q_len, group, dim, device=DEVICE)
    risen = quiet.clone()
    risen[:, :, ::2] += 2 * direction
    arguments = ints(0), ints(LONG), dim**-0.5, EVERYTHING
    a, b = kernels.attend(kv, quiet, *arguments), kernels.attend(kv, risen, *arguments)
    assert torch.equal(a[:, :, 1::2], b[:, :, 1::2])
    assert not torch.equal(a[:, :, ::2], b[:, :, ::2])
