"""Choosing the next token of each slot from its logits, all slots at once.

A row's token depends on its own logits, parameters, seed and position, and on nothing else in the batch. Three things
make that hold to the last bit:

- Rows are handled in groups of one width (64 candidates, or the whole vocabulary), so no row's parameters set the width
  of another's sums. Maxima, and sorts of distinct keys, can't depend on the number of rows at all. Sums could, so the
  only ones here are `prefix_sums`, in an order fixed by the width, in float64.
- Ties are decided: equal logits rank by token id, lowest first, in greedy choice, truncation and draw alike.
- The random number of a token is a hash of (seed, position). There is no generator whose state others could advance.

Order: real ids only and logit_bias, min_tokens, repetition, presence and frequency penalty, the request's constraint
(what it does not allow gets -inf), temperature, top_k, top_p, min_p, draw. top_p sees the distribution that top_k left.
Each of the three truncations keeps the head of the ranking, so a row's candidates are always the first `kept` of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pocketllm.engine.sampled import LogprobTensors, SampleResult
from pocketllm.errors import RequestError, SlotError
from pocketllm.kernels.types import TensorSpec
from pocketllm.options import SamplingParams

NARROW = 64  # candidates of a row with 0 < top_k <= NARROW, and the most log-probabilities a request may ask for
_BLOCK = 64
_DRAWN = 16  # rows that are sorted at a time: each takes many times its own size
_FORBIDDEN = float("-inf")
_LOW_32_BITS = 0xFFFFFFFF
_MASK_64 = 2**64 - 1


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit of the result depends on every bit of x."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one token: number `position` of the splitmix64 stream that `seed` begins."""
    golden = 0x9E3779B97F4A7C15
    state = _mix((seed + golden) & _MASK_64)
    return (_mix((state + (position + 1) * golden) & _MASK_64) >> 11) * 2.0**-53


def prefix_sums(x: Tensor) -> Tensor:
    """Inclusive sums along the last dimension of x [m, N], [m, N]; the order of additions depends on N alone.

    `torch.cumsum` is no substitute: on a GPU its order depends on the number of rows. Here blocks of 64 are summed by
    doubling steps, and the sums of whole blocks in the same way again.
    """
    m, n = x.shape
    padded = x.new_zeros(m, -(-n // 64) * 64)
    padded[:, :n] = x
    blocks = padded.view(m, -1, 64)
    step = 1
    while step < min(n, 64):
        blocks[..., step:] = blocks[..., step:] + blocks[..., :-step]
        step *= 2
    if n > 64:
        blocks[:, 1:] += prefix_sums(blocks[..., -1])[:, :-1, None]
    return padded[:, :n]


def ranking_keys(logits: Tensor) -> Tensor:
    """[m, V] float32 -> int64 keys, all different in a row: greater logit first, then lower id. `ids_of` inverts.

    The bits of a float compare like an integer once those of negative numbers are flipped (sign aside).
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ordered.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(_LOW_32_BITS - ids)


def ids_of(keys: Tensor) -> Tensor:
    return _LOW_32_BITS - (keys & _LOW_32_BITS)


def best_ids(logits: Tensor) -> Tensor:
    """[m, V] -> [m, min(NARROW, V)] int64: the ids at the head of the ranking, in order.

    Cut the vocabulary into blocks and rank the blocks by their greatest logit: no id outside the NARROW best blocks can
    be among the NARROW best ids, for each of those blocks has an id that ranks before it. So few ids need keys.
    """
    m, n = logits.shape
    if n <= NARROW * _BLOCK:
        return ids_of(ranking_keys(logits).topk(min(NARROW, n), dim=-1).values)
    padded = logits.new_full((m, -(-n // _BLOCK) * _BLOCK), _FORBIDDEN)
    padded[:, :n] = logits
    maxima = padded.view(m, -1, _BLOCK).amax(dim=-1)
    blocks = ids_of(ranking_keys(maxima).topk(NARROW, dim=-1).values).sort(dim=-1).values  # candidates by id, for ties
    candidates = (blocks[..., None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    best = ids_of(ranking_keys(padded.gather(-1, candidates)).topk(NARROW, dim=-1).values)
    return candidates.gather(-1, best).clamp_(max=n - 1)  # padding ranks first only in a row of NaN


def unpacked(words: Tensor, size: int) -> Tensor:
    """int32 [w] -> bool [size]: bit i % 32 of word i // 32; False from w * 32 on. On the CPU."""
    bits = np.unpackbits(words.numpy().view(np.uint8), count=size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


@dataclass(frozen=True)
class _Request:
    """What the sampler knows of the request in a slot."""

    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    bias_ids: Tensor | None = None  # [b] int64
    bias: Tensor | None = None  # [b] float32
    end_ids: Tensor | None = None  # [e] int64: forbidden before min_tokens

    @property
    def penalised(self) -> bool:
        p = self.params
        return (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def narrow(self) -> bool:
        return 0 < self.params.top_k <= NARROW

    def edits(self, num_generated: int) -> bool:
        """Whether this row's logits are changed before the choice."""
        return self.penalised or self.bias_ids is not None or num_generated < self.params.min_tokens


def _maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value of each row of x [n, V] and its index, the lowest of equal ones; a NaN counts as largest."""
    if x.device.type != "cpu":
        values, index = x.max(dim=-1)
        return values, index
    index = torch.from_numpy(x.numpy().argmax(axis=-1))  # 10 times faster than torch's on one core
    return x.gather(1, index.unsqueeze(1)).squeeze(1), index


class Sampler:
    """Sampling state of every slot, allocated once: which tokens the prompt holds, and how often each was generated.

    vocab_limit: the tokenizer's number of ids; ids from there on (padding of the output matrix) do not exist here.
    Slot `num_slots` is the spare one of padding rows: always greedy, needs no `start`.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu", vocab_limit: int | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.vocab_limit = vocab_size if vocab_limit is None else vocab_limit
        if not 0 < self.vocab_limit <= vocab_size:
            raise ValueError(f"vocab_limit = {vocab_limit}: must be in [1, {vocab_size}], the size of the vocabulary")
        self.device = torch.device(device)
        self._prompt_mask, self._output_counts = (
            torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) for spec in self.specs(num_slots, vocab_size)
        )
        self._requests: list[_Request | None] = [None] * num_slots + [_Request()]

    @staticmethod
    def specs(num_slots: int, vocab_size: int) -> tuple[TensorSpec, ...]:
        """The buffers that are held from construction on, for the memory plan."""
        shape = (num_slots + 1, vocab_size)
        return (
            TensorSpec("sampler.prompt_mask", shape, torch.bool),
            TensorSpec("sampler.output_counts", shape, torch.int32),
        )

    @staticmethod
    def workspace(num_rows: int, vocab_size: int) -> int:
        """Most bytes of intermediate tensors that sampling so many rows takes at a time, for the memory plan: penalties and
        log-probabilities of all of them, or edited logits and a sort, which on a GPU has copies of its own."""
        return vocab_size * 4 * max(8 * num_rows, 2 * num_rows + 18 * min(num_rows, _DRAWN))

    @property
    def nbytes(self) -> int:
        return self._prompt_mask.nbytes + self._output_counts.nbytes

    def start(
        self, slot: int, params: SamplingParams, prompt_ids: Sequence[int], eos_ids: Iterable[int], seed: int
    ) -> None:
        """A request begins in `slot`. `eos_ids`: the model's own; `seed`: of this request's random stream."""
        for token in params.logit_bias:
            if token >= self.vocab_limit:
                raise RequestError(f"logit_bias: token id {token} does not exist; ids are 0 to {self.vocab_limit - 1}")
        bias = {t: b if b > -100 else _FORBIDDEN for t, b in params.logit_bias.items()}
        ends = sorted({t for t in (*eos_ids, *params.stop_token_ids) if t < self.vocab_limit})
        request = _Request(
            params,
            seed,
            bias_ids=self._tensor(list(bias), torch.int64) if bias else None,
            bias=self._tensor(list(bias.values()), torch.float32) if bias else None,
            end_ids=self._tensor(ends, torch.int64) if ends and params.min_tokens else None,
        )
        self._requests[slot] = request
        if request.penalised:
            self._output_counts[slot].zero_()
            self._prompt_mask[slot].zero_()
            self._prompt_mask[slot, self._tensor(prompt_ids, torch.int64)] = True

    def stop(self, slot: int) -> None:
        """The request in `slot` has ended."""
        self._requests[slot] = None

    def at_once(self, slot: int) -> bool:
        """Whether rows of the slot may be sampled together that follow each other: no choice depends on the one before."""
        return not self._request(slot).penalised

    def record(self, slots: Sequence[int], tokens: Tensor) -> None:
        """`tokens` [n] int64 (device) were generated in `slots` (a slot may stand here several times)."""
        rows = [i for i, slot in enumerate(slots) if self._request(slot).penalised]
        if not rows:  # the counts serve penalties only
            return
        index = self._tensor([slots[i] for i in rows], torch.int64)
        ones = torch.ones(len(rows), dtype=torch.int32, device=self.device)
        self._output_counts.index_put_((index, tokens[self._tensor(rows, torch.int64)]), ones, accumulate=True)

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        num_generated: Sequence[int],
        allowed: Mapping[int, Tensor] | None = None,
    ) -> SampleResult:
        """The next token of each row.

        logits         [n, vocab_size] float32, not changed
        slots          whose row it is; rows of one slot (a verify pass) share the counts as they are recorded now
        positions      index in its sequence of the token to be chosen: picks the row's random number
        num_generated  tokens generated before it
        allowed        row -> the tokens it may choose, packed as `TokenConstraint.allowed` gives them; others: all
        """
        requests = [self._request(slot) for slot in slots]
        raw = logits[:, : self.vocab_limit]
        edited = self._edit(raw, slots, requests, num_generated, allowed or {})
        best, tokens = _maximum(edited)
        is_bad = ~best.isfinite()
        forbidden = None
        if edited is not raw:
            sound = raw.amax(dim=-1).isfinite()  # an edit may have overwritten the NaN
            forbidden = is_bad & sound
            is_bad = is_bad | ~sound
        for narrow in (True, False):
            drawn = [i for i, r in enumerate(requests) if r.params.temperature > 0 and r.narrow == narrow]
            for rows in (drawn[i : i + _DRAWN] for i in range(0, len(drawn), _DRAWN)):
                index = self._tensor(rows, torch.int64)
                params = [requests[i].params for i in rows]
                draws = [uniform(requests[i].seed, positions[i]) for i in rows]
                tokens[index] = self._draw(edited[index], params, draws, narrow)
        tokens = tokens.masked_fill_(is_bad, 0)
        return SampleResult(tokens, is_bad, self._logprobs(raw, tokens, requests), forbidden)

    def _request(self, slot: int) -> _Request:
        request = self._requests[slot]
        if request is None:
            raise SlotError(f"slot {slot} has no request to sample for: call start first")
        return request

    def _edit(
        self,
        logits: Tensor,
        slots: Sequence[int],
        requests: Sequence[_Request],
        num_generated: Sequence[int],
        allowed: Mapping[int, Tensor],
    ) -> Tensor:
        """logit_bias, min_tokens, penalties and constraints: [n, V], the same tensor if no row needs any."""
        if not allowed and not any(r.edits(g) for r, g in zip(requests, num_generated, strict=True)):
            return logits
        x = logits.clone()
        for row, (request, generated) in enumerate(zip(requests, num_generated, strict=True)):
            if request.bias_ids is not None and request.bias is not None:
                x[row, request.bias_ids] += request.bias
            if request.end_ids is not None and generated < request.params.min_tokens:
                x[row, request.end_ids] = _FORBIDDEN
        rows = [i for i, r in enumerate(requests) if r.penalised]
        if rows:
            index, slot_index = self._tensor(rows, torch.int64), self._tensor([slots[i] for i in rows], torch.int64)
            x[index] = self._penalise(x[index], slot_index, [requests[i].params for i in rows])
        for row, words in allowed.items():
            x[row].masked_fill_(~unpacked(words, x.shape[-1]).to(self.device), _FORBIDDEN)
        return x

    def _penalise(self, x: Tensor, slots: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """x [m, V]. Products and differences are separate operations: a fused one rounds differently.

        Leaving out a penalty that no row has changes no bit of any row: x / 1 and x - 0 are x.
        """
        counts = self._output_counts[slots, : x.shape[-1]]  # [m, V] int32
        generated = counts > 0
        values = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        repetition, presence, frequency = self._columns(values, torch.float32)
        if any(p.repetition_penalty != 1 for p in params):
            seen = self._prompt_mask[slots, : x.shape[-1]].logical_or_(generated)
            x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        if any(p.presence_penalty for p in params):
            x = x - generated * presence
        if any(p.frequency_penalty for p in params):
            x = x - counts * frequency
        return x

    def _draw(self, x: Tensor, params: Sequence[SamplingParams], draws: Sequence[float], narrow: bool) -> Tensor:
        """Rows x [m, V] of one width -> tokens [m] int64, by inverting the distribution of the ranked candidates."""
        ids = best_ids(x) if narrow else ids_of(ranking_keys(x).sort(dim=-1, descending=True).values)  # [m, width]
        width = ids.shape[-1]
        values = [
            (p.temperature, min(p.top_k or width, width), p.top_p, p.min_p, u)
            for p, u in zip(params, draws, strict=True)
        ]
        temperature, top_k, top_p, min_p, draw = self._columns(values, torch.float64)

        ordered = x.gather(-1, ids).double()
        weights = ((ordered - ordered[:, :1]) / temperature).exp()  # relative to the best; exactly 0 where forbidden
        sums = prefix_sums(weights)
        by_top_k = top_k.long()
        mass = sums.gather(-1, by_top_k - 1) * top_p
        by_top_p = torch.where(top_p < 1, _first(sums >= mass) + 1, width)
        by_min_p = _first((weights < min_p) | (weights == 0), missing=width)  # and never what is forbidden
        kept = torch.minimum(torch.minimum(by_top_k, by_top_p), by_min_p).clamp_(min=1)
        chosen = _first(sums > sums.gather(-1, kept - 1) * draw)
        return ids.gather(-1, torch.minimum(chosen, kept - 1)).squeeze(-1)

    def _logprobs(self, raw: Tensor, tokens: Tensor, requests: Sequence[_Request]) -> LogprobTensors | None:
        rows = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
        if not rows:
            return None
        index = self._tensor(rows, torch.int64)
        x = raw[index]
        logprobs = x.log_softmax(dim=-1)
        top_ids = best_ids(x)
        counts = [min(requests[i].params.logprobs or 0, top_ids.shape[-1]) for i in rows]
        chosen = logprobs.gather(-1, tokens[index, None]).squeeze(-1)
        return LogprobTensors(rows, counts, chosen, top_ids, logprobs.gather(-1, top_ids))

    def _columns(self, values: Sequence[tuple[float, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A tuple per row -> a tensor [m, 1] per member, in one transfer."""
        return self._tensor(values, dtype)[..., None].unbind(1)

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _first(condition: Tensor, missing: int = 0) -> Tensor:
    """[m, N] bool -> [m, 1] int64: index of the first True, `missing` where there is none."""
    found, index = condition.to(torch.uint8).max(dim=-1, keepdim=True)
    return index.masked_fill(found == 0, missing)
