"""Steps of append and attend that follow each other on a GPU without a pause, as they do in an engine's graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from test_triton_attention import DEVICE, EVERYTHING, GPU, KVFormat, every_format, ints, kernels, make_kv

STEPS, HEADS, GROUP, DIM = 16, 2, 6, 256
STARTS = (2040, 60)  # tokens of a slot before the first step


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@every_format
def test_an_early_kernel_finds_what_was_stored_before_it(kv_format: KVFormat) -> None:
    """A kernel may start while the one before it runs; it must not read what that one, or the one before that, writes."""
    kv = make_kv(kv_format, [n + STEPS for n in STARTS], dim=DIM, heads=HEADS, page=256)
    k, v = torch.randn(2, STEPS, 2, HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
    q = torch.randn(STEPS, 2, 1, HEADS * GROUP, DIM, dtype=torch.bfloat16, device=DEVICE)
    lens = [ints(*(n + i + 1 for n in STARTS)) for i in range(STEPS)]
    slots, positions = ints(0, 1), [n.long() - 1 for n in lens]

    def run(wait: bool) -> Tensor:
        outs = []
        for i in range(STEPS):
            kernels.append(kv, k[i], v[i], slots, positions[i])
            if wait:
                torch.cuda.synchronize()
            outs.append(kernels.attend(kv, q[i], slots, lens[i], DIM**-0.5, EVERYTHING))
            if wait:
                torch.cuda.synchronize()
        return torch.stack(outs)

    before = [plane.clone() for plane in kv.planes]
    wanted = run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(wait=False)
    for _ in range(10):
        for plane, stored in zip(kv.planes, before, strict=True):
            plane.copy_(stored)
        graph.replay()
        assert torch.equal(got, wanted)
