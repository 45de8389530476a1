"""Constraints in the sampler and the engine: what they forbid is not chosen, and nobody else notices them."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import drain, engine, prompt, tokens_of
from pocketllm import AsyncEngine
from pocketllm.engine.sampler import Sampler, unpacked
from pocketllm.errors import RequestError
from pocketllm.options import SamplingParams
from pocketllm.text.grammar import Regex, build_constraint
from pocketllm.text.thinking import ThinkingBudget
from tagged_tokenizer import END, tagged_tokenizer

VOCAB, EOS = 512, 510  # of the tiny models


def packed(ids, size=VOCAB):
    words = [0] * -(-size // 32)
    for i in ids:
        words[i // 32] |= 1 << (i % 32)
    return torch.tensor([w if w < 2**31 else w - 2**32 for w in words], dtype=torch.int32)


class Script:
    """Allows each set of ids in turn (None: all), then is finished."""

    def __init__(self, *steps, then_finished=True):
        self.steps, self.taken, self.then_finished = steps, [], then_finished

    def allowed(self):
        step = self.steps[len(self.taken)] if len(self.taken) < len(self.steps) else [EOS]
        return None if step is None else packed(step)

    def accept(self, token_id):
        self.taken.append(token_id)

    @property
    def finished(self):
        return self.then_finished and len(self.taken) == len(self.steps)


def settings_of(**values):
    return SamplingParams(**{"max_tokens": 30} | values)


# -- sampler -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 199)), st.integers(1, 250))
def test_masks_unpack_to_the_ids_they_hold(ids, size):
    bits = unpacked(packed(ids, 200), size)
    assert bits.shape == (size,)
    assert set(bits.nonzero().flatten().tolist()) == {i for i in ids if i < size}


def sampler_of(*params, vocab=VOCAB, **options):
    sampler = Sampler(len(params), vocab, **options)
    for slot, p in enumerate(params):
        sampler.start(slot, p, [], [EOS] if vocab > EOS else [], seed=slot)
    return sampler


def sample(sampler, logits, allowed=None):
    n = len(logits)
    return sampler.sample(logits, list(range(n)), [3] * n, [0] * n, allowed)


HOT = SamplingParams(temperature=5.0, seed=1)


@pytest.mark.parametrize(
    "params", [SamplingParams(), HOT, SamplingParams(temperature=5.0, top_k=5), SamplingParams(top_p=0.1)]
)
def test_only_allowed_tokens_are_chosen(params):
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(0))
    ids = [31, 32, 63, 300]
    sampler = sampler_of(*[params] * 200)
    result = sample(sampler, logits, {row: packed(ids) for row in range(200)})
    assert set(result.tokens.tolist()) <= set(ids)
    if not params.temperature:
        assert result.tokens.tolist() == [ids[i] for i in logits[:, ids].argmax(-1).tolist()]
    assert result.bad == result.forbidden == []


def test_rows_without_a_constraint_get_the_same_bits():
    params = [
        SamplingParams(logprobs=3),
        HOT,
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(temperature=1, top_k=9),
    ]
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    sampler = sampler_of(*params * 2)
    free = sample(sampler, logits)
    mixed = sample(sampler, logits, {row: packed([5]) for row in (0, 3, 6)})
    assert mixed.tokens[[0, 3, 6]].tolist() == [5] * 3
    others = [1, 2, 4, 5, 7]
    assert mixed.tokens[others].tolist() == free.tokens[others].tolist()
    assert mixed.logprobs[4] == free.logprobs[4]


def test_logprobs_stay_those_of_the_raw_logits():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    result = sample(sampler_of(SamplingParams(logprobs=2)), logits, {0: packed([7])})
    expected = logits[0].log_softmax(-1)
    assert result.logprobs[0].chosen == expected[7]
    assert [t for t, _ in result.logprobs[0].top] == expected.topk(2).indices.tolist()


def test_a_constraint_comes_after_bias_and_penalties():
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 9.0
    biased = sampler_of(SamplingParams(logit_bias={4: 1.0, 9: 50.0}))
    assert sample(biased, logits, {0: packed([3, 4, 9])}).tokens.tolist() == [9]
    assert sample(biased, logits, {0: packed([3, 4])}).tokens.tolist() == [3]
    assert sample(biased, logits, {0: packed([4, 5])}).tokens.tolist() == [4]


def test_ids_beyond_the_mask_or_the_vocabulary_do_not_exist():
    logits = torch.zeros(1, VOCAB)
    logits[0, 400] = 9.0
    assert sample(sampler_of(SamplingParams()), logits, {0: packed(range(32), 32)}).tokens.tolist() == [0]
    result = sample(sampler_of(SamplingParams(), vocab_limit=300), logits, {0: packed([299, 400])})
    assert result.tokens.tolist() == [299]


def test_nothing_left_is_told_from_broken_logits():
    logits = torch.zeros(4, VOCAB)
    logits[1, 8] = math.nan
    sampler = sampler_of(*[SamplingParams(logit_bias={7: -100})] * 3, SamplingParams())
    result = sample(sampler, logits, {0: packed([7]), 1: packed([7]), 2: packed([7, 8]), 3: packed([])})
    assert result.bad == [0, 1, 3]
    assert result.forbidden == [0, 3]
    assert result.tokens[2] == 8


# -- engine ------------------------------------------------------------------------------------------------------------


def test_others_in_the_batch_get_the_tokens_they_get_alone(tmp_path):
    running = engine("qwen3_5", tmp_path, kernels="reference")
    params = [settings_of(max_tokens=20, ignore_eos=True), settings_of(max_tokens=20, temperature=1.5, seed=4)]
    alone = []
    for i, p in enumerate(params):
        running.add_request(prompt(9 + i, i), p, request_id="one")
        alone.append(tokens_of(drain(running)["one"]))
    script = Script(*[[k, k + 100, 200] for k in range(12)])
    for i, p in enumerate(params):
        running.add_request(prompt(9 + i, i), p, request_id=str(i))
    running.add_request(prompt(30), settings_of(max_tokens=30), request_id="bound", constraint=script)
    outputs = drain(running)
    assert [tokens_of(outputs["0"]), tokens_of(outputs["1"])] == alone
    bound = tokens_of(outputs["bound"])
    assert len(bound) == 12
    assert all(token in (k, k + 100, 200) for k, token in enumerate(bound))
    assert outputs["bound"][-1].finish_reason == "stop"
    assert script.taken == bound


def test_a_complete_answer_ends_the_request_even_when_ends_are_ignored(tmp_path):
    running = engine("qwen3", tmp_path, kernels="reference")
    running.add_request(prompt(5), settings_of(ignore_eos=True), request_id="done", constraint=Script([1], [2]))
    ended = Script([1], [EOS, EOS], None)
    running.add_request(prompt(5), settings_of(), request_id="eos", constraint=ended)
    last = Script([1], [2])
    running.add_request(prompt(5), settings_of(max_tokens=2), request_id="last", constraint=last)
    cut = Script([1], [2], [3])
    running.add_request(prompt(5), settings_of(max_tokens=2), request_id="cut", constraint=cut)
    outputs = drain(running)
    assert {name: (tokens_of(o), o[-1].finish_reason) for name, o in outputs.items()} == {
        "done": ([1, 2], "stop"),
        "eos": ([1, EOS], "stop"),
        "last": ([1, 2], "stop"),
        "cut": ([1, 2], "length"),
    }
    assert ended.taken == [1]  # the token that ends a request is not told


class Fails(Script):
    def __init__(self, where, error):
        super().__init__(None, None, None, None)
        self.where, self.error = where, error

    def allowed(self):
        if self.where == "allowed" and len(self.taken) == 2:
            raise self.error
        return super().allowed()

    def accept(self, token_id):
        super().accept(token_id)
        if self.where == "accept" and len(self.taken) == 2:
            raise self.error


@pytest.mark.parametrize("where", ["allowed", "accept"])
@pytest.mark.parametrize("error", [RequestError("not in the grammar"), ZeroDivisionError("oh")])
def test_a_failing_constraint_ends_its_own_request_only(tmp_path, where, error):
    running = engine("qwen3", tmp_path, kernels="reference")
    params = settings_of(max_tokens=10, ignore_eos=True)
    running.add_request(prompt(7), params, request_id="other")
    alone = tokens_of(drain(running)["other"])
    running.add_request(prompt(7), params, request_id="other")
    running.add_request(prompt(5), params, request_id="bad", constraint=Fails(where, error))
    outputs = drain(running)
    assert tokens_of(outputs["other"]) == alone
    *_, last = outputs["bad"]
    assert last.finish_reason == "error"
    assert len(tokens_of(outputs["bad"])) == 2
    assert isinstance(last.error, RequestError)
    assert ("not in the grammar" in str(last.error)) or ("ZeroDivisionError: oh" in str(last.error))
    assert running.slots.num_free == 4
    running.add_request(prompt(7), params, request_id="other")  # its slot is fit for use
    assert tokens_of(drain(running)["other"]) == alone


def test_a_batch_of_failing_constraints_only(tmp_path):
    running = engine("qwen3", tmp_path, kernels="reference")
    for name in "ab":
        constraint = Fails("allowed", RequestError("no"))
        running.add_request(prompt(5), settings_of(ignore_eos=True), request_id=name, constraint=constraint)
    assert {name: o[-1].finish_reason for name, o in drain(running).items()} == {"a": "error", "b": "error"}


@pytest.mark.parametrize(
    ("params", "constraint"),
    [
        (settings_of(min_tokens=5), Script([1], [EOS], then_finished=False)),
        (settings_of(min_tokens=5), Script([1])),
        (settings_of(logit_bias={2: -100}), Script([1], [2])),
        (settings_of(), Script([1], [])),
    ],
)
def test_nothing_left_to_choose_is_a_clear_error(tmp_path, params, constraint):
    running = engine("qwen3", tmp_path, kernels="reference")
    running.add_request(prompt(5), params, request_id="r", constraint=constraint)
    outputs = drain(running)["r"]
    assert tokens_of(outputs) == [1]
    assert "no token is left to choose" in str(outputs[-1].error)


def test_min_tokens_keeps_a_grammar_from_ending_early(tmp_path):
    running = engine("qwen3", tmp_path, kernels="reference")
    constraint = Script(*[[EOS, 1]] * 20)
    running.add_request(
        prompt(5), settings_of(min_tokens=6, logit_bias={EOS: 100.0}), request_id="r", constraint=constraint
    )
    assert tokens_of(drain(running)["r"]) == [1] * 6 + [EOS]


def test_a_callers_slot_is_usable_after_its_constraint_failed(tmp_path):
    running = engine("qwen3_5", tmp_path, kernels="reference")
    params = settings_of(max_tokens=6, ignore_eos=True)
    running.add_request(prompt(12), params, request_id="fresh")
    expected = tokens_of(drain(running)["fresh"])
    slot = running.acquire_slot()
    running.add_request(prompt(12), params, request_id="r", slot=slot, constraint=Fails("allowed", RequestError("no")))
    drain(running)
    running.add_request(prompt(12), params, request_id="again", slot=slot)
    assert tokens_of(drain(running)["again"]) == expected


def test_through_the_asynchronous_engine(tmp_path):
    async def run():
        running = AsyncEngine(engine("qwen3", tmp_path, kernels="reference"))
        try:
            _, stream = await running.submit(prompt(5), settings_of(), constraint=Script([4], [5], [6]))
            return [token async for output in stream for token in output.new_token_ids]
        finally:
            await running.close()

    assert asyncio.run(run()) == [4, 5, 6]


# -- the budget of reasoning -------------------------------------------------------------------------------------------

TOKENIZER = tagged_tokenizer()
ENDING = TOKENIZER.encode("\n</think>\n\n")


def allowed_ids(constraint):
    mask = constraint.allowed()
    return None if mask is None else unpacked(mask, TOKENIZER.vocab_size).nonzero().flatten().tolist()


def write(constraint, text, free=True):
    for token in TOKENIZER.encode(text):
        allowed = allowed_ids(constraint)
        assert allowed is None or (not free and token in allowed)
        constraint.accept(token)


def read_forced(constraint):
    """The tokens that the constraint dictates now."""
    forced = []
    while (allowed := allowed_ids(constraint)) is not None and len(allowed) == 1:
        forced += allowed
        constraint.accept(allowed[0])
    return forced


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_after_its_budget_reasoning_is_ended(budget):
    constraint = ThinkingBudget(TOKENIZER, budget, opened=True)
    write(constraint, "abcd"[:budget])
    assert read_forced(constraint) == ENDING
    write(constraint, "anything</think> <think> and more, freely")
    assert not constraint.finished


@pytest.mark.parametrize("tags", [True, False])
def test_reasoning_that_ends_by_itself_is_left_alone(tags):
    tokenizer = tagged_tokenizer(tags=tags)
    constraint = ThinkingBudget(tokenizer, 14, opened=True)
    for token in tokenizer.encode("ab</think>" + "x" * 40):
        assert constraint.allowed() is None
        constraint.accept(token)


def test_reasoning_counts_from_where_the_model_opens_it():
    constraint = ThinkingBudget(TOKENIZER, 3, opened=False)
    write(constraint, "\n<think>abc")
    assert read_forced(constraint) == ENDING
    constraint = ThinkingBudget(TOKENIZER, 3, opened=False)
    write(constraint, "no <think> here, at any length")


def test_a_character_is_not_cut_in_two():
    constraint = ThinkingBudget(TOKENIZER, 2, opened=True)
    write(constraint, "a€")  # four tokens, of which the second begins the character
    assert read_forced(constraint) == ENDING


def test_budget_and_grammar_together():
    constraint = build_constraint(TOKENIZER, Regex("[xy]{3}"), starts_after="</think>", thinking_budget=3)
    write(constraint, "abc", free=False)
    for token in ENDING:
        assert allowed_ids(constraint) == [token]
        constraint.accept(token)
    assert TOKENIZER.encode("x")[0] in allowed_ids(constraint)
    assert TOKENIZER.encode("a")[0] not in allowed_ids(constraint)
    write(constraint, "xyx", free=False)
    assert constraint.finished


def test_a_budget_alone_through_the_engine(tmp_path):
    running = engine("qwen3", tmp_path, kernels="reference")
    end = TOKENIZER.token_to_id(END)
    assert end < EOS
    running.add_request(
        prompt(5),
        settings_of(
            max_tokens=20,
            temperature=1.0,
            seed=3,
            ignore_eos=True,
            logit_bias=dict.fromkeys(range(256, VOCAB), -100.0) | {ENDING[1]: 0.0, ENDING[2]: 0.0},
        ),
        request_id="r",
        constraint=build_constraint(TOKENIZER, None, starts_after="</think>", thinking_budget=6),
    )
    tokens = tokens_of(drain(running)["r"])
    at = tokens.index(ENDING[1])
    assert at <= 10
    assert tokens[at - 1 : at + 2] == ENDING
    assert len(tokens) == 20
