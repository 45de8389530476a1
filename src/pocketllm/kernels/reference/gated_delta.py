"""Gated DeltaNet over slots: causal convolution, gated delta rule, gated norm (arXiv 2412.06464).

Per value head, with state S [dk, dv], key k, value v, write strength beta and log decay g of a token:

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   o = S^T q

Prefill uses the equal chunked form, decode the recurrence, and verify the recurrence on a copy, with a journal of what
each token wrote, so that any number of drafted tokens can be committed afterwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pocketllm.kernels.reference.rowwise import sigmoid
from pocketllm.kernels.types import GatedDeltaWeights, LayerState, Readers

CHUNK = 64  # tokens per chunk; chunks end on multiples of this from the start of the sequence


def gated_delta_prefill(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    cu_seqlens_q: Tensor,
    kv_lens: Tensor,
) -> Tensor:
    out = torch.empty_like(z)
    bounds = cu_seqlens_q.tolist()
    for i, (slot, kv_len) in enumerate(zip(slot_ids.tolist(), kv_lens.tolist(), strict=True)):
        part = slice(bounds[i], bounds[i + 1])
        if part.start == part.stop:
            continue
        window = torch.cat((state.conv[slot].T, qkv[part].float()))  # [W - 1 + Q, C]
        state.conv[slot] = window[len(window) - state.conv.shape[2] :].T
        q, k, v = _split_heads(_conv(window.unsqueeze(0), weights)[0], weights)
        g, beta = _gates(a[part], b[part], weights)
        recurrent, pieces, done, length = state.recurrent[slot], [], 0, bounds[i + 1] - bounds[i]
        while done < length:
            step = min(CHUNK - (kv_len - length + done) % CHUNK, length - done)
            piece = slice(done, done + step)
            recurrent, o = chunk_delta_rule(recurrent, q[piece], k[piece], v[piece], g[piece], beta[piece])
            pieces.append(o)
            done += step
        state.recurrent[slot] = recurrent
        out[part] = _gated_norm(torch.cat(pieces), z[part], weights)
    return out


def gated_delta_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    readers: Readers = (),
) -> Tensor:
    slots = slot_ids.long()
    window = torch.cat((state.conv[slots].transpose(1, 2), qkv.float().unsqueeze(1)), dim=1)  # [n, W, C]
    state.conv[slots] = window[:, 1:].transpose(1, 2).to(state.conv.dtype)
    q, k, v = _split_heads(_conv(window, weights)[:, 0], weights)
    g, beta = _gates(whole(a), whole(b), weights)
    decayed, d, o = _delta_step(state.recurrent[slots], q, k, v, _exp(g), beta)
    state.recurrent[slots] = decayed + k.unsqueeze(-1) * d.unsqueeze(-2)
    return _gated_norm(o, z, weights)


def gated_delta_verify(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: LayerState,
    slot_ids: Tensor,
    q_len: int,
    readers: Readers = (),
) -> Tensor:
    slots = slot_ids.long()
    x = qkv.float().view(-1, q_len, qkv.shape[-1])  # [n, Q, C]
    window = torch.cat((state.conv[slots].transpose(1, 2), x), dim=1)  # [n, W - 1 + Q, C]
    q, k, v = _split_heads(_conv(window, weights), weights)  # [n, Q, H, d]
    g, beta = (t.view(-1, q_len, t.shape[-1]) for t in _gates(whole(a), whole(b), weights))
    recurrent, outputs = state.recurrent[slots], []
    state.journal_x[slots, :q_len] = x.to(state.journal_x.dtype)
    state.journal_k[slots, :q_len] = k[:, :, :: k.shape[2] // weights.num_key_heads]
    decay = _exp(g)
    state.journal_g[slots, :q_len] = decay
    for j in range(q_len):
        decayed, d, o = _delta_step(recurrent, q[:, j], k[:, j], v[:, j], decay[:, j], beta[:, j])
        recurrent = decayed + k[:, j].unsqueeze(-1) * d.unsqueeze(-2)
        state.journal_d[slots, j] = d
        outputs.append(o)
    return _gated_norm(torch.stack(outputs, dim=1).flatten(0, 1), z, weights)


def gated_delta_commit(state: LayerState, slot_ids: Tensor, num_tokens: Tensor) -> None:
    repeat = state.recurrent.shape[1] // state.journal_k.shape[2]
    for slot, count in zip(slot_ids.tolist(), num_tokens.tolist(), strict=True):
        recurrent = state.recurrent[slot]
        for j in range(count):
            k = state.journal_k[slot, j].repeat_interleave(repeat, dim=0)  # [Hv, dk]
            decayed = recurrent * state.journal_g[slot, j, :, None, None]
            recurrent = decayed + k.unsqueeze(-1) * state.journal_d[slot, j].unsqueeze(-2)
        state.recurrent[slot] = recurrent
        state.conv[slot] = torch.cat((state.conv[slot], state.journal_x[slot, :count].T), dim=1)[:, count:]


def chunk_delta_rule(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule over a chunk of tokens at once.

    state [H, dk, dv]; q, k [T, H, dk]; v [T, H, dv]; g (log decay), beta [T, H], all float32 -> (new state, o [T, H, dv]).
    With G the running sum of g, each token's write d_i solves a unit-lower-triangular system:
    d_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) d_j = beta_i (v_i - exp(G_i) S^T k_i).
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, T, d]
    beta = beta.T.unsqueeze(-1)  # [H, T, 1]
    total = g.T.cumsum(-1)  # [H, T]
    grow = total.exp().unsqueeze(-1)
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()  # [H, T, T]; tril first: no overflow above
    lower = (beta * (k @ k.transpose(1, 2)) * decay).tril(-1)
    target = beta * (v - grow * (k @ state))
    d = torch.linalg.solve_triangular(lower, target, upper=False, unitriangular=True)
    o = grow * (q @ state) + ((q @ k.transpose(1, 2)) * decay) @ d
    last = total[:, -1:]
    new_state = last.exp().unsqueeze(-1) * state + (k * (last - total).exp().unsqueeze(-1)).transpose(1, 2) @ d
    return new_state, o.transpose(0, 1)


def _delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token for n slots: state [n, H, dk, dv] -> (decayed state, write d [n, H, dv], output o [n, H, dv])."""
    decayed = state * decay[..., None, None]
    d = beta.unsqueeze(-1) * (v - (decayed * k.unsqueeze(-1)).sum(-2))
    o = ((decayed + k.unsqueeze(-1) * d.unsqueeze(-2)) * q.unsqueeze(-1)).sum(-2)
    return decayed, d, o


def _conv(window: Tensor, weights: GatedDeltaWeights) -> Tensor:
    """window [n, W - 1 + Q, C] -> silu of the causal depthwise convolution, [n, Q, C]."""
    taps = weights.conv.shape[1]
    out_len = window.shape[1] - taps + 1
    y = window[:, :out_len] * weights.conv[:, 0]
    for j in range(1, taps):
        y = y + window[:, j : j + out_len] * weights.conv[:, j]
    return F.silu(y)


def _split_heads(x: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., C] -> q, k [..., Hv, dk], normalised and repeated per value head, and v [..., Hv, dv]; q scaled."""
    key_dim = weights.num_key_heads * weights.key_head_dim
    q, k, v = torch.split(x, [key_dim, key_dim, x.shape[-1] - 2 * key_dim], dim=-1)
    q, k = (t.reshape(*t.shape[:-1], weights.num_key_heads, weights.key_head_dim) for t in (q, k))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * weights.key_head_dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    repeat = weights.num_value_heads // weights.num_key_heads
    q, k = (t.repeat_interleave(repeat, dim=-2) for t in (q, k))
    return q, k, v.reshape(*v.shape[:-1], weights.num_value_heads, weights.value_head_dim)


def _gates(a: Tensor, b: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
    """a, b [T, Hv] -> log decay g <= 0 and write strength beta in (0, 1), float32 (see `sigmoid` for the float64)."""
    g = -weights.a_log.double().exp() * F.softplus(a.double() + weights.dt_bias)
    return g.float(), sigmoid(b)


def whole(x: Tensor) -> Tensor:
    """[T, Hv], or summands [P, T, Hv] that are added in order -> [T, Hv]."""
    return x if x.dim() == 2 else sum(x[1:], x[0])


def _exp(x: Tensor) -> Tensor:
    return x.double().exp().float()


def _gated_norm(o: Tensor, z: Tensor, weights: GatedDeltaWeights) -> Tensor:
    """o [T, Hv, dv], z [T, Hv * dv] -> RMS norm per head, times silu(z): [T, Hv * dv] in z's dtype."""
    y = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    return (y.flatten(1) * F.silu(z.float())).to(z.dtype)
