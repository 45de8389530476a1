"""KV formats: what each loses, that one is one file, and the reference attention against torch's own."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pocketllm
from engines import drain, engine, feed, prompt, tokens_of
from pocketllm import SamplingParams
from pocketllm.cache.formats import KV_FORMATS, KVFormat
from pocketllm.cache.formats.cubic_levels import levels, unpack
from pocketllm.cache.formats.rotation import hadamard, rotate, rotate_back
from pocketllm.cache.formats.turboquant_k8v4 import encode_v4
from pocketllm.cache.kv import KVCache, KVCacheShape
from pocketllm.cache.pages import PageEdits
from pocketllm.kernels import reference
from pocketllm.kernels.types import AttentionMask, KeyBias, LayerKV

HEAD_DIMS = (64, 96, 128, 256)
each_format = pytest.mark.parametrize("fmt", KV_FORMATS.values(), ids=KV_FORMATS)
PAGE, SLOTS, MAX_PAGES = 16, 3, 90


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def storage(fmt: KVFormat, heads: int, head_dim: int, key_bias: KeyBias | None = None) -> LayerKV:
    """One layer of a paged cache whose slots' pages are scattered, filled with bytes that are NaN as floats."""
    shape = KVCacheShape(fmt, "paged", 1, SLOTS, SLOTS * MAX_PAGES, MAX_PAGES, PAGE, heads, head_dim)
    cache = KVCache(shape, torch.device("cpu"), [key_bias])
    order = torch.randperm(SLOTS * MAX_PAGES, generator=torch.Generator().manual_seed(0)).tolist()
    cache.apply(PageEdits(entries=[(i // MAX_PAGES, i % MAX_PAGES, page) for i, page in enumerate(order)]))
    for plane in cache.layers[0].planes:
        plane.view(torch.uint8).fill_(0xFF)
    return cache.layers[0]


@each_format
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_format_keeps_what_it_promises(fmt: KVFormat, head_dim: int) -> None:
    torch.manual_seed(head_dim)
    k, v = torch.randn(200, 2, head_dim) * 3, torch.randn(200, 2, head_dim) * 0.05
    planes = fmt.encode(k, v)
    assert [(p.shape[-1], p.dtype) for p in planes] == [(s.width, s.dtype) for s in fmt.planes(head_dim)]
    for got, want in zip(fmt.decode(planes, head_dim), (k, v), strict=True):
        assert relative(got, want) <= fmt.tolerance
    assert fmt.bytes_per_token(head_dim) == sum(p[0, 0].nbytes for p in planes)


def test_fp8_chooses_its_scale() -> None:
    """Less error than with the largest value at the end of the range, and k . decode(k) = |k|^2."""
    torch.manual_seed(3)
    k = torch.randn(500, 1, 64)
    fmt = KV_FORMATS["fp8"]
    got, _ = fmt.decode(fmt.encode(k, k), 64)
    torch.testing.assert_close((got * k).sum(-1), k.square().sum(-1), rtol=1e-5, atol=0)
    scale = k.abs().amax(-1, keepdim=True) / 448
    plain = (k / scale).to(torch.float8_e4m3fn).float() * scale
    assert (got - k).square().sum() < 0.9 * (plain - k).square().sum()


def four_bits(v: Tensor) -> Tensor:
    fmt = KV_FORMATS["turboquant_k8v4"]
    return fmt.decode(fmt.encode(v, v), v.shape[-1])[1]


def noise_db(got: Tensor, want: Tensor) -> float:
    return 20 * math.log10(relative(got, want))


def test_four_bits_of_v_are_not_short_of_it() -> None:
    """v . decode(v) = |v|^2, of rows or, where a row has several coarse scales, on average: attention averages errors
    away, but not a scale that is always too small."""
    torch.manual_seed(5)
    v = torch.randn(400, 1, 128)
    torch.testing.assert_close((four_bits(v) * v).sum(-1), v.square().sum(-1), rtol=1e-4, atol=0)
    for head_dim in (16, 48, 64):
        v = torch.randn(4000, 1, head_dim)
        shares = (four_bits(v) * v).sum(-1) / v.square().sum(-1)
        assert abs(float(shares.mean()) - 1) < 1e-3
        assert float((shares - 1).abs().max()) < 0.1


def test_small_heads_have_four_scales_for_v() -> None:
    """At the bytes of one, they gain 1.9 dB on Gaussian values; and a quiet group loses nothing to a loud one."""
    torch.manual_seed(6)
    v = torch.randn(2000, 1, 64)
    assert noise_db(four_bits(v), v) < -23.1
    one_scale, scale = encode_v4(rotate(v))
    assert noise_db(rotate_back(levels()[unpack(one_scale)] * scale), v) > -21.5
    uneven = rotate_back(torch.cat((v[..., :16] / 16, v[..., 16:32] / 4, v[..., 32:]), dim=-1))
    assert noise_db(rotate(four_bits(uneven))[..., 16:32], rotate(uneven)[..., 16:32]) < -22
    fmt = KV_FORMATS["turboquant_k8v4"]
    assert fmt.bytes_per_token(64) == 64 + 32 + 4 + 4


@each_format
def test_zeros_and_extremes_survive(fmt: KVFormat) -> None:
    k = torch.zeros(3, 1, 64)
    k[1] = 30000.0
    k[2, 0, 5] = 1e-4
    decoded, zeros = fmt.decode(fmt.encode(k, torch.zeros(3, 1, 64)), 64)
    assert decoded.isfinite().all()
    assert zeros.abs().max() < 1e-9  # 4-bit codes have no level at zero, so the scale must be small
    assert not decoded[0].any()
    assert relative(decoded[1], k[1]) < 0.05


def test_bytes_per_token_at_head_dim_256() -> None:
    expected = {
        "fp32": 2048,
        "fp16": 1024,
        "bf16": 1024,
        "fp8": 520,
        "int8_per_token_head": 520,
        "turboquant_k8v4": 392,
    }
    assert {name: fmt.bytes_per_token(256) for name, fmt in KV_FORMATS.items()} == expected


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_is_orthogonal_and_spreads_outliers(head_dim: int) -> None:
    x = torch.randn(50, head_dim)
    torch.testing.assert_close(rotate_back(rotate(x)), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x)), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(x).norm(dim=-1), x.norm(dim=-1))
    spike = torch.zeros(1, head_dim)
    spike[0, 3] = 1
    assert rotate(spike).abs().max() <= 1 / (head_dim & -head_dim) ** 0.5 + 1e-6


def test_the_rotation_saves_a_head_with_outliers() -> None:
    """Eight channels ten times larger: unrotated, 8-bit codes lose 9 dB; rotated ones nothing."""
    torch.manual_seed(0)
    x = torch.randn(500, 1, 256)
    x[..., :8] *= 10
    rotated, _ = KV_FORMATS["int8_per_token_head"].decode(KV_FORMATS["int8_per_token_head"].encode(x, x), 256)
    scale = x.abs().amax(-1, keepdim=True) / 127
    plain = (x / scale).round() * scale
    assert relative(rotated, x) < 0.4 * relative(plain, x)


@each_format
@pytest.mark.parametrize(("heads", "group", "head_dim"), [(2, 1, 64), (1, 7, 64), (2, 3, 96), (2, 6, 128)])
def test_reference_attention_matches_torch(fmt: KVFormat, heads: int, group: int, head_dim: int) -> None:
    """append, attend (decode and verify), prefill and dequantize over scattered pages, across tile and page edges."""
    torch.manual_seed(1)
    kv, mask, scale = storage(fmt, heads, head_dim), AttentionMask(), head_dim**-0.5
    lengths = {0: 1, 1: 1030, 2: 37}
    stored: dict[int, tuple[Tensor, Tensor]] = {}
    for slot, length in lengths.items():
        k, v = torch.randn(2, length, heads, head_dim).unbind()
        reference.append(kv, k, v, torch.full((length,), slot, dtype=torch.int32), torch.arange(length))
        stored[slot] = fmt.decode(fmt.encode(k, v), head_dim)
        for got, want in zip(reference.dequantize(kv, slot, length), stored[slot], strict=True):
            assert torch.equal(got, want)

    def expected(q: Tensor, slot: int) -> Tensor:  # q [Q, Hq, D]: the last Q tokens of the slot
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in stored[slot])
        length, q_len = lengths[slot], len(q)
        causal = torch.arange(length) <= torch.arange(length - q_len, length).unsqueeze(1)
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=causal).transpose(0, 1)

    slots = torch.tensor([2, 1], dtype=torch.int32)
    lens = torch.tensor([37, 1030], dtype=torch.int32)
    q = torch.randn(2, 4, heads * group, head_dim)
    got = reference.attend(kv, q, slots, lens, scale, mask)
    for i, slot in enumerate(slots.tolist()):
        torch.testing.assert_close(got[i], expected(q[i], slot), atol=2e-5, rtol=1e-4)
    packed = torch.randn(30 + 200, heads * group, head_dim)
    bounds = torch.tensor([0, 30, 230], dtype=torch.int32)
    got = reference.prefill(kv, packed, slots, bounds, lens, scale, mask)
    torch.testing.assert_close(got[:30], expected(packed[:30], 2), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got[30:], expected(packed[30:], 1), atol=2e-5, rtol=1e-4)
    alone = reference.attend(kv, q[:1, :, :, :], torch.tensor([0]), torch.tensor([1]), scale, mask)[0, -1]
    torch.testing.assert_close(alone, stored[0][1][0].repeat_interleave(group, dim=0), atol=1e-5, rtol=1e-4)


def test_window_and_sinks_match_a_dense_mask() -> None:
    torch.manual_seed(2)
    kv = storage(KV_FORMATS["fp32"], 1, 64)
    k, v = torch.randn(2, 1100, 1, 64).unbind()
    reference.append(kv, k, v, torch.zeros(1100, dtype=torch.int32), torch.arange(1100))
    q = torch.randn(1, 3, 2, 64)
    got = reference.attend(kv, q, torch.tensor([0]), torch.tensor([1100]), 0.125, AttentionMask(window=30, sinks=4))
    query, key = torch.arange(1097, 1100).unsqueeze(1), torch.arange(1100)
    seen = (key <= query) & ((query - key < 30) | (key < 4))
    keys, values = (x.transpose(0, 1).expand(2, -1, -1) for x in (k, v))
    want = F.scaled_dot_product_attention(q[0].transpose(0, 1), keys, values, attn_mask=seen)
    torch.testing.assert_close(got[0].transpose(0, 1), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5"])
def test_a_toy_format_runs_everything(kind: str, toy_formats: list[str], tmp_path: Path) -> None:
    """What stands in tests/toy_formats.py is all that a new format needs."""
    for name in toy_formats:
        toy = engine(kind, tmp_path / name, kv_cache_dtype=name, kernels="reference", max_draft_tokens=2)
        plain = engine(kind, tmp_path / name, kv_cache_dtype="fp32", kernels="reference", max_draft_tokens=2)
        assert toy.plan.kv.nbytes == toy.runner.kv.nbytes
        logits = []
        for slots in (toy, plain):
            slot = slots.acquire_slot()
            feed(slots, {slot: prompt(40)})
            fork = slots.fork_slot(slot)
            feed(slots, {fork: [1, 2]}, "verify")
            slots.commit([fork], [1])
            logits.append(feed(slots, {fork: [3]}, "decode")[fork])
        torch.testing.assert_close(logits[0], logits[1], atol=0.02, rtol=0)
        name = toy.add_request(prompt(20), SamplingParams(max_tokens=5, ignore_eos=True))
        assert len(tokens_of(drain(toy)[name])) == 5


def test_no_format_is_named_outside_its_file() -> None:
    """Names of lossy formats must not stand in the package's code (its documentation may speak of them)."""
    package = Path(pocketllm.__file__).parent
    names = [name for name, fmt in KV_FORMATS.items() if fmt.drops_key_bias]
    assert len(names) >= 3
    pattern = re.compile("|".join(rf"[\"']{name}[\"']" for name in names))
    for file in package.rglob("*.py"):
        # "fp8" is a checkpoint's word, and a storage of embeddings, too
        if file.parent.name not in ("formats", "weights") and file.name != "config_hf.py":
            code = re.sub(r'"""(?:.|\n)*?"""', "", file.read_text())
            code = code.replace('EmbeddingStorage = Literal["none", "w8", "fp8"]', "")
            assert not pattern.search(code), f"{file.name} names a KV format: ask the format object instead"
            assert not re.search(r"isinstance\([^)]*(KVFormat|Fp8|Int8PerTokenHead|TurboQuant)", code), file.name
