"""Long chunks through a library's attention: K and V decoded for it, its two kinds of softmax joined. On a GPU it is the
library's own; elsewhere torch stands in for it, and Triton's interpreter runs the kernels around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from pocketllm.cache.formats import KV_FORMATS
from pocketllm.kernels import reference
from pocketllm.kernels.triton import attention, prefill_library, tuning
from pocketllm.kernels.triton.prefill_library import library_attention, long_prefill
from pocketllm.kernels.types import AttentionMask, PrefillPart
from test_triton_attention import DEVICE, EVERYTHING, GPU, error, ints, limit, make_kv

HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
NAMES = ["fp16", "bf16", "fp8", "int8_per_token_head", "turboquant_k8v4"]
formats = pytest.mark.parametrize("kv_format", [KV_FORMATS[n] for n in NAMES], ids=NAMES)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What `library_attention` returns, spelled out."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], device=q.device).triu(1).bool(), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).to(q.dtype).contiguous(), scores.logsumexp(-1)


@formats
@pytest.mark.parametrize(
    ("before", "new"), [(0, 70), (64, 100), (331, 150), (4096, 2304)] if GPU else [(0, 70), (203, 40), (20, 150)]
)
@pytest.mark.parametrize("dim", [64, 256] if GPU else [64])
def test_a_chunk_is_the_references(
    kv_format: object, before: int, new: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, group = 2, 3
    attend = library_attention if HOPPER else torch_attention
    held = 128  # tokens that the buffer holds: of longer chunks only a part at a time is attended
    monkeypatch.setattr(prefill_library, "BUFFER", held * 2 * heads * dim * 2)
    sizes: list[int] = []

    def noting(q: Tensor, k: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
        sizes.append(len(k))
        return attend(q, k, *arguments)  # type: ignore[arg-type]

    kv = make_kv(kv_format, [17, before + new], dim=dim, heads=heads)
    q = torch.randn(new, heads * group, dim, device=DEVICE)
    wanted = reference.prefill(kv, q, ints(1), ints(0, new), ints(before + new), dim**-0.5, EVERYTHING)
    got = long_prefill(kv, q, PrefillPart(1, new, before + new), dim**-0.5, noting)
    assert got.dtype == q.dtype
    assert error(got, wanted) < limit(kv_format)
    assert max(sizes) <= held
    assert len(sizes) > 1 or before + new <= held


def test_long_chunks_take_the_library_and_short_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together in one pass; not with a window, and not without lengths on the host."""
    asked: list[int] = []

    def attend(q: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
        asked.append(len(q))
        return torch_attention(q, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill_library, "LONG", 60)
    monkeypatch.setattr(prefill_library, "library_attention", attend)
    monkeypatch.setattr(prefill_library, "_has_library", lambda device: True)
    kv_format = KV_FORMATS["int8_per_token_head"]
    kv = make_kv(kv_format, [90, 40, 64], dim=64, heads=2)
    q = torch.randn(70 + 30 + 64, 4, 64, device=DEVICE)
    places = kv, q, ints(0, 1, 2), ints(0, 70, 100, 164), ints(90, 40, 64), 0.125
    parts = [PrefillPart(0, 70, 90), PrefillPart(1, 30, 40), PrefillPart(2, 64, 64)]
    wanted = reference.prefill(*places, EVERYTHING)
    assert error(prefill_library.prefill(*places, EVERYTHING, parts), wanted) < limit(kv_format)
    assert asked == [70, 70, 64]  # the first has tokens before it
    asked.clear()
    assert error(prefill_library.prefill(*places, EVERYTHING), wanted) < limit(kv_format)
    window = AttentionMask(30, 4)
    got = prefill_library.prefill(*places, window, parts)
    assert torch.equal(got, attention.prefill(*places, window))
    assert asked == []


def test_the_workspace_of_a_long_chunk_holds_what_the_library_is_given() -> None:
    short, long = (attention.attention_workspace(24, 256, attention.LONG - i, 40000, prefill=True) for i in (1, 0))
    per_token = short // (attention.LONG - 1)  # the merely longer chunk's own
    assert long - short > attention.BUFFER + per_token


@pytest.mark.parametrize("device", ["default", "NVIDIA H200"])
@pytest.mark.parametrize("tokens", [1, 128, 1000, 2048, 2049, 40000])
def test_the_workspace_of_decode_holds_its_splits(device: str, tokens: int) -> None:
    """Of any table: a row's values in float32, its largest score and its sum of weights, for each split."""
    heads, head_dim = 24, 256
    for config in tuning.parse(tuning.device_table(device)):
        for sizes in (config.attend, config.verify):
            partials = heads * sizes.num_splits(tokens) * (head_dim + 2) * 4
            assert partials <= attention.attention_workspace(heads, head_dim, 1, tokens, prefill=False)
