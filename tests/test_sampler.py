"""The sampler against a slow per-row implementation written from the parameters' definitions, and its promises:
a row's token is the same whatever stands beside it, and a bad row harms no other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.engine.sampler import NARROW, Sampler, best_ids, prefix_sums, uniform
from pocketllm.errors import RequestError, SlotError
from pocketllm.options import SamplingParams

VOCAB, LIMIT = 300, 290
EOS = (7, 11)
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def reference(logits, params, prompt, output, u, num_generated, eos=EOS, limit=LIMIT):
    """One row, in Python. Returns the token and how close the draw came to a boundary between two tokens."""
    x = [float(v) for v in np.asarray(logits, np.float32)[:limit]]
    f32 = np.float32
    for token, bias in params.logit_bias.items():
        x[token] = -math.inf if bias <= -100 else float(f32(x[token]) + f32(bias))
    if num_generated < params.min_tokens:
        for token in {*eos, *params.stop_token_ids}:
            x[token] = -math.inf
    for token in {*prompt, *output}:
        r = f32(params.repetition_penalty)
        x[token] = float(f32(x[token]) / r if x[token] > 0 else f32(x[token]) * r)
    for token in set(output):
        x[token] = float(f32(x[token]) - f32(params.presence_penalty))
        x[token] = float(f32(x[token]) - f32(output.count(token)) * f32(params.frequency_penalty))
    ranking = sorted(range(limit), key=lambda t: (-x[t], t))
    if params.temperature == 0:
        return ranking[0], math.inf
    if params.top_k:
        ranking = ranking[: params.top_k]
    probs = [math.exp((x[t] - x[ranking[0]]) / params.temperature) for t in ranking]
    total = math.fsum(probs)
    margin = math.inf
    if params.top_p < 1:
        before, kept = 0.0, 0
        for p in probs:
            margin = min(margin, abs(before / total - params.top_p))
            if before / total >= params.top_p:
                break
            before, kept = before + p, kept + 1
        probs, ranking = probs[:kept], ranking[:kept]
    survivors = [(t, p) for t, p in zip(ranking, probs, strict=True) if p >= params.min_p * probs[0] and p > 0]
    total = math.fsum(p for _, p in survivors)
    reached = 0.0
    for token, p in survivors:
        reached += p / total
        margin = min(margin, abs(reached - u))
        if reached > u:
            return token, margin
    return survivors[-1][0], margin


def start(sampler, slot, params, prompt=(), output=(), seed=0):
    sampler.start(slot, params, list(prompt), EOS, seed)
    if output:
        sampler.record([slot] * len(output), torch.tensor(output, device=sampler.device))


def one(params, logits, *, prompt=(), output=(), seed=0, position=0, num_generated=0, limit=LIMIT):
    sampler = Sampler(1, len(logits), vocab_limit=min(limit, len(logits)))
    start(sampler, 0, params, prompt, output, seed)
    return sampler.sample(torch.as_tensor(logits)[None], [0], [position], [num_generated])


def draws(params, logits, count=400, **state):
    """The set of tokens that `count` positions of one request give."""
    sampler = Sampler(1, len(logits), vocab_limit=min(LIMIT, len(logits)))
    start(sampler, 0, params, **state)
    rows = torch.as_tensor(logits, dtype=torch.float32).expand(count, -1)
    return sampler.sample(rows, [0] * count, list(range(count)), [0] * count).tokens.tolist()


token_ids = st.integers(0, LIMIT - 1)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 20, NARROW, NARROW + 1, 200, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.8, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.1, 1.8, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.2]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -math.inf, -3.0, 2.5, 10.0]), max_size=4),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
requests = st.fixed_dictionaries(
    {
        "params": sampling_params,
        "prompt": st.lists(token_ids, max_size=8),
        "output": st.lists(st.integers(0, 20), max_size=8),
        "seed": st.integers(0, 2**63 - 1),
        "position": st.integers(0, 2**20),
        "num_generated": st.integers(0, 5),
        "logits_seed": st.integers(0, 2**32 - 1),
        "ties": st.booleans(),  # logits on a coarse grid: many are equal
    }
)


def logits_of(request):
    x = torch.randn(VOCAB, generator=torch.Generator().manual_seed(request["logits_seed"])) * 3
    return (x / 2).round() * 2 if request["ties"] else x


def sample_batch(batch, order, device="cpu"):
    """Tokens of `batch` when its requests sit in slots 0, 1, ... and their rows come in `order`."""
    sampler = Sampler(len(batch), VOCAB, device, vocab_limit=LIMIT)
    for slot, r in enumerate(batch):
        start(sampler, slot, r["params"], r["prompt"], r["output"], r["seed"])
    rows = [batch[slot] for slot in order]
    result = sampler.sample(
        torch.stack([logits_of(r) for r in rows]).to(device),
        order,
        [r["position"] for r in rows],
        [r["num_generated"] for r in rows],
    )
    assert result.bad == []
    return dict(zip(order, result.tokens.tolist(), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=300, deadline=None)
@given(r=requests)
def test_agrees_with_the_reference(device, r):
    u = uniform(r["seed"], r["position"])
    expected, margin = reference(logits_of(r), r["params"], r["prompt"], r["output"], u, r["num_generated"])
    got = sample_batch([r], [0], device)[0]
    assert got == expected or margin < 1e-12  # a draw on the boundary itself may fall to either side


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(requests, min_size=8, max_size=8), order=st.permutations(range(8)))
def test_a_row_does_not_depend_on_the_others(device, batch, order):
    alone = {slot: sample_batch([r], [0], device)[0] for slot, r in enumerate(batch)}
    assert sample_batch(batch, list(range(8)), device) == alone
    assert sample_batch(batch, order, device) == alone
    assert sample_batch(batch, order[:3], device) == {slot: alone[slot] for slot in order[:3]}


@pytest.mark.parametrize("device", DEVICES)
def test_prefix_sums_are_the_same_bits_for_any_number_of_rows(device):
    for width in (1, 2, 63, 64, 65, 4096, 5000):
        x = torch.rand(9, width, dtype=torch.float64, generator=torch.Generator().manual_seed(width)).to(device)
        before = x.clone()
        together = prefix_sums(x)
        assert torch.equal(x, before)
        assert torch.allclose(together, x.cumsum(-1), rtol=1e-14, atol=0)
        assert all(torch.equal(together[i : i + 1], prefix_sums(x[i : i + 1])) for i in range(9))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 40, 4096, 4097, 20_000])
@pytest.mark.parametrize("levels", [1, 3, 40, 100_000])
def test_best_ids_are_the_head_of_a_stable_sort(device, size, levels):
    """`levels`: how many different logits there are, so 1 and 3 are all ties."""
    generator = torch.Generator().manual_seed(size + levels)
    logits = torch.randint(-levels, levels, (4, size), generator=generator) / 7
    logits[1] = torch.where(logits[1] < 0.5, -math.inf, logits[1])  # a row with much forbidden
    logits[2, :] = -math.inf
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :NARROW]
    assert torch.equal(best_ids(logits.to(device)).cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_best_ids_of_a_bad_row_are_still_ids(device):
    logits = torch.full((2, 4097), -math.nan)  # by its bits this NaN ranks below the padding of the last block
    logits[1, 320:384] = -math.inf
    logits[1, -1] = 1.0
    ids = best_ids(logits.to(device))
    assert ((ids >= 0) & (ids < 4097)).all()


def test_uniform_is_spread_evenly_and_differs_by_seed_and_position():
    values = np.array([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert 0 <= values.min() < values.max() < 1
    assert len(set(values)) == len(values)
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 100  # chi-square, 49 degrees of freedom: 1 - 1e-5
    for near in (values.reshape(100, 100), values.reshape(100, 100).T):
        assert abs(np.corrcoef(near[:-1].ravel(), near[1:].ravel())[0, 1]) < 0.04


@pytest.mark.parametrize("top_k", [0, 20])
def test_the_draws_have_the_distribution_of_the_logits(top_k):
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3))
    temperature, count = 0.8, 20_000
    tokens = draws(SamplingParams(temperature=temperature, top_k=top_k), logits, count, seed=5)
    expected = (logits.double() / temperature).softmax(-1).numpy() * count
    observed = np.bincount(tokens, minlength=20)
    assert ((observed - expected) ** 2 / expected).sum() < 52  # 19 degrees of freedom: 1 - 7e-5


FLAT = [0.0] * 100


@pytest.mark.parametrize("top_k", [0, NARROW])
def test_the_largest_random_number_never_draws_what_is_forbidden(monkeypatch, top_k):
    """The rounded sum at the end of the ranking may exceed all sums before it."""
    monkeypatch.setattr("pocketllm.engine.sampler.uniform", lambda seed, position: 1 - 2.0**-53)
    sampler = Sampler(1, 1000)
    start(sampler, 0, SamplingParams(temperature=1.0, top_k=top_k))
    for seed in range(50):
        logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed)) * 8
        logits[:, 40 + seed :] = -math.inf
        token = sampler.sample(logits, [0], [0], [0]).tokens.item()
        assert logits[0, token].isfinite()


def test_temperature_zero_takes_the_best_and_ties_go_to_the_lowest_id():
    assert one(SamplingParams(), torch.tensor([1.0, 3.0, 3.0, 2.0])).tokens.tolist() == [1]
    assert one(SamplingParams(), torch.tensor([-0.0, 0.0])).tokens.tolist() == [0]
    ties = torch.tensor([-0.0, 0.0, -1.0])
    assert set(draws(SamplingParams(temperature=1.0, top_k=1), ties)) == {0}  # -0.0 is no less than 0.0


def test_temperature_spreads_or_gathers():
    logits = [2.0, 1.0, 0.0]
    share = [draws(SamplingParams(temperature=t), logits, 2000).count(0) / 2000 for t in (0.2, 1.0, 5.0)]
    assert share[0] > 0.98 > 0.7 > share[1] > 0.6 > 0.45 > share[2]


@pytest.mark.parametrize("top_k", [5, NARROW, NARROW + 1])
def test_top_k_leaves_exactly_k(top_k):
    assert set(draws(SamplingParams(temperature=1.0, top_k=top_k), FLAT, 3000)) == set(range(top_k))


def test_top_p_leaves_the_smallest_set_that_reaches_it():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.8, 3), (0.9, 4)):
        assert set(draws(SamplingParams(temperature=1.0, top_p=top_p), logits)) == set(range(kept))


def test_top_p_sees_what_top_k_left():
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    assert set(draws(SamplingParams(temperature=1.0, top_k=2, top_p=0.65), logits)) == {0}  # 0.4 / 0.6 > 0.65


def test_min_p_is_relative_to_the_best():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(draws(SamplingParams(temperature=1.0, min_p=0.5), logits)) == {0, 1}


def test_repetition_penalty_counts_prompt_and_output_and_weakens_either_sign():
    params = SamplingParams(repetition_penalty=2.0)
    assert one(params, torch.tensor([3.0, 2.0]), prompt=[0]).tokens.tolist() == [1]
    assert one(params, torch.tensor([3.0, 2.0]), output=[0]).tokens.tolist() == [1]
    assert one(params, torch.tensor([-1.0, -1.5]), prompt=[0]).tokens.tolist() == [1]


def test_presence_and_frequency_penalties_count_the_output_only():
    logits = torch.tensor([1.0, 0.0])
    assert one(SamplingParams(presence_penalty=1.5), logits, output=[0]).tokens.tolist() == [1]
    assert one(SamplingParams(presence_penalty=0.9), logits, output=[0, 0, 0]).tokens.tolist() == [0]
    assert one(SamplingParams(frequency_penalty=0.4), logits, output=[0, 0]).tokens.tolist() == [0]
    assert one(SamplingParams(frequency_penalty=0.4), logits, output=[0, 0, 0]).tokens.tolist() == [1]
    both = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    assert one(both, logits, prompt=[0]).tokens.tolist() == [0]


def test_logit_bias_adds_and_forbids():
    assert one(SamplingParams(logit_bias={1: 2.0}), torch.tensor([1.0, 0.0])).tokens.tolist() == [1]
    far = torch.tensor([500.0, 0.0])
    assert one(SamplingParams(logit_bias={0: -99.0}), far).tokens.tolist() == [0]
    assert one(SamplingParams(logit_bias={0: -100.0}), far).tokens.tolist() == [1]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_forbids_ends_until_then(ignore_eos):
    logits = torch.zeros(20)
    logits[list(EOS)] = torch.tensor([9.0, 8.0])
    logits[3] = 7.0
    params = SamplingParams(min_tokens=2, stop_token_ids=(3,), ignore_eos=ignore_eos)
    assert one(params, logits, num_generated=1).tokens.tolist() == [0]
    assert one(params, logits, num_generated=2).tokens.tolist() == [7]


def test_ids_from_the_limit_on_do_not_exist():
    logits = torch.zeros(VOCAB)
    logits[LIMIT:] = 50.0
    logits[-1] = math.nan
    for params in (SamplingParams(logprobs=4), SamplingParams(temperature=1.0, logprobs=4)):
        result = one(params, logits)
        assert result.bad == []
        assert result.tokens.item() < LIMIT
        assert all(token < LIMIT for token, _ in result.logprobs[0].top)
        assert result.logprobs[0].chosen == pytest.approx(-math.log(LIMIT))


def test_logprobs_are_of_the_raw_logits_and_only_for_rows_that_ask():
    sampler = Sampler(3, 100)
    start(sampler, 0, SamplingParams())
    start(sampler, 1, SamplingParams(temperature=0.5, logit_bias={4: 50.0}, logprobs=2))
    start(sampler, 2, SamplingParams(logprobs=0))
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    logits[1, [9, 8]] = 6.0
    result = sampler.sample(logits, [0, 1, 2], [0, 0, 0], [0, 0, 0])
    expected = logits.log_softmax(-1)
    assert set(result.logprobs) == {1, 2}
    assert result.tokens[1] == 4
    assert result.logprobs[1].chosen == expected[1, 4]
    assert result.logprobs[1].top == ((8, expected[1, 8]), (9, expected[1, 9]))
    assert result.logprobs[2].top == ()


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_are_the_same_bits_alone_and_together(device):
    logits = torch.randn(5, 50_000, generator=torch.Generator().manual_seed(4)).to(device)
    sampler = Sampler(5, 50_000, device)
    for slot in range(5):
        start(sampler, slot, SamplingParams(logprobs=5))
    together = sampler.sample(logits, list(range(5)), [0] * 5, [0] * 5).logprobs
    for slot in range(5):
        assert sampler.sample(logits[slot : slot + 1], [slot], [0], [0]).logprobs[0] == together[slot]


def test_a_bad_row_is_reported_and_leaves_the_others_alone():
    params = [SamplingParams(temperature=1.0, top_k=20), SamplingParams(), SamplingParams(temperature=1.0)] * 2
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(6, VOCAB, vocab_limit=LIMIT)
    for slot, p in enumerate(params):
        start(sampler, slot, p, seed=slot)
    slots, positions, generated = list(range(6)), [5] * 6, [0] * 6
    clean = sampler.sample(logits, slots, positions, generated)
    assert clean.bad == []
    broken = logits.clone()
    broken[0, 17] = math.nan
    broken[1, 3] = math.nan
    broken[2, 4] = math.inf
    broken[4] = -math.inf
    result = sampler.sample(broken, slots, positions, generated)
    assert result.bad == [0, 1, 2, 4]
    assert result.tokens[[3, 5]].tolist() == clean.tokens[[3, 5]].tolist()
    assert result.tokens[[0, 1, 2, 4]].tolist() == [0] * 4


def test_an_edit_does_not_hide_a_nan_and_forbidding_everything_is_bad():
    logits = torch.zeros(20)
    logits[EOS[0]] = math.nan
    assert one(SamplingParams(min_tokens=1), logits).bad == [0]
    assert one(SamplingParams(logit_bias={EOS[0]: -100.0}), logits).bad == [0]
    assert one(SamplingParams(temperature=1.0, logit_bias=dict.fromkeys(range(4), -100.0)), torch.zeros(4)).bad == [0]


def test_logits_are_not_changed():
    logits = torch.zeros(VOCAB)
    params = SamplingParams(logit_bias={1: 5.0}, min_tokens=2, repetition_penalty=1.5)
    one(params, logits, prompt=[3], output=[4])
    assert not logits.any()


@pytest.mark.parametrize("seen", [{"prompt": [9]}, {"output": [9]}])
def test_a_slot_forgets_its_last_request(seen):
    sampler = Sampler(1, 10)
    params = SamplingParams(repetition_penalty=2.0)
    logits = torch.arange(10.0)[None]
    start(sampler, 0, params, **seen)
    assert sampler.sample(logits, [0], [0], [0]).tokens.tolist() == [8]
    start(sampler, 0, params)
    assert sampler.sample(logits, [0], [0], [0]).tokens.tolist() == [9]
    sampler.stop(0)
    with pytest.raises(SlotError, match="slot 0"):
        sampler.sample(logits, [0], [0], [0])


def test_the_spare_slot_is_greedy_and_counts_nothing():
    sampler = Sampler(2, 10)
    assert sampler.sample(torch.arange(10.0)[None], [2], [0], [0]).tokens.tolist() == [9]
    sampler.record([2], torch.tensor([9]))


def test_ids_and_limits_that_do_not_exist_are_refused():
    sampler = Sampler(1, VOCAB, vocab_limit=LIMIT)
    with pytest.raises(RequestError, match=f"0 to {LIMIT - 1}"):
        start(sampler, 0, SamplingParams(logit_bias={LIMIT: 1.0}))
    with pytest.raises(ValueError, match="vocab_limit"):
        Sampler(1, 10, vocab_limit=11)


def test_the_plan_counts_what_is_held():
    assert Sampler(3, 100).nbytes == sum(spec.nbytes for spec in Sampler.specs(3, 100)) == 4 * 100 * (1 + 4)
