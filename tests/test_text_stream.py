"""Detokenizer and stop strings: however a stream is cut, the text is that of the whole."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketllm.text.detokenizer import IncrementalDetokenizer
from pocketllm.text.stop import StopChecker
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(embedded_model) -> Tokenizer:
    return load_tokenizer(embedded_model)


@pytest.fixture(scope="module")
def bytes_to_id(tokenizer) -> dict[bytes, int]:
    return {data: i for i in range(tokenizer.vocab_size) if len(data := tokenizer.token_bytes(i)) == 1}


def test_single_bytes_exist_for_the_tests_below(bytes_to_id):
    assert len(bytes_to_id) > 200


def cut(items, sizes):
    """`items` in consecutive pieces of the given sizes (then the rest at once)."""
    start = 0
    for size in sizes:
        yield items[start : start + size]
        start += size
    yield items[start:]


# Bytes that begin, continue and break characters of every length; then any tokens, special ones among them.
awkward_bytes = st.sampled_from([0x41, 0x80, 0xA0, 0xBF, 0x9F, 0xC3, 0xE0, 0xE2, 0xED, 0xEF, 0xF0])


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.one_of(awkward_bytes.map(lambda b: bytes([b])), st.integers(0, 49151), st.integers(0, 3)), max_size=24),
    st.lists(st.integers(0, 5), max_size=10),
    st.booleans(),
)
def test_pieces_join_to_the_decoding_of_the_whole(tokenizer, bytes_to_id, items, sizes, skip):
    ids = [
        item if isinstance(item, int) else bytes_to_id[item]
        for item in items
        if item in bytes_to_id or isinstance(item, int)
    ]
    stream = IncrementalDetokenizer(tokenizer, skip_special=skip)
    text = "".join([stream.push(piece) for piece in cut(ids, sizes)]) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special=skip)


def test_a_character_appears_when_it_is_complete(tokenizer, bytes_to_id):
    stream = IncrementalDetokenizer(tokenizer)
    assert [stream.push([bytes_to_id[bytes([b])]]) for b in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert stream.finish() == ""


def test_bytes_that_can_never_be_valid_come_out_at_once(tokenizer, bytes_to_id):
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push([bytes_to_id[b"\xe2"]]) == ""
    assert stream.push([bytes_to_id[b"A"]]) == "\ufffdA"
    assert stream.push([bytes_to_id[b"\x80"]]) == "\ufffd"
    assert stream.push([bytes_to_id[b"\xe0"]]) == ""
    assert stream.push([bytes_to_id[b"\x80"]]) == "\ufffd\ufffd"  # too long a form: no UTF-8
    assert stream.push([bytes_to_id[b"\xe2"]]) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_left_out_or_shown(tokenizer):
    ids = tokenizer.encode("hi<|im_end|>there")
    assert IncrementalDetokenizer(tokenizer).push(ids) == "hithere"
    assert IncrementalDetokenizer(tokenizer, skip_special=False).push(ids) == "hi<|im_end|>there"


def test_the_cost_of_a_token_does_not_grow(tokenizer):
    stream = IncrementalDetokenizer(tokenizer)
    token = tokenizer.encode(" word")
    started = time.perf_counter()
    for _ in range(200_000):
        stream.push(token)
    assert time.perf_counter() - started < 10  # decoding the whole each time would take hours


def whole(stops, text):
    """The definition: read one character at a time until the text ends with a stop string, the longest if several."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


def stream(stops, pieces):
    checker, shown, hit = StopChecker(stops), "", None
    for piece in pieces:
        text, hit = checker.push(piece)
        shown += text
    return shown + checker.finish(), hit


letters = st.text("ab\n", max_size=30)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4), letters, st.lists(st.integers(0, 6), max_size=12))
def test_any_cutting_gives_the_same(stops, text, sizes):
    expected = whole(stops, text)
    assert stream(stops, [text]) == expected
    assert stream(stops, cut(text, sizes)) == expected
    assert stream(stops, text) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), letters)
def test_holds_back_no_more_than_needed_and_never_shows_a_beginning(stops, text):
    checker, shown = StopChecker(stops), ""
    for i, character in enumerate(text):
        new, hit = checker.push(character)
        shown += new
        if hit:
            break
        held = text[: i + 1][len(shown) :]
        ends = [text[k : i + 1] for k in range(i + 1)]
        assert held == next((e for e in ends if any(s.startswith(e) for s in stops)), "")


def test_stop_strings_by_example():
    checker = StopChecker(["</s>", "\n\n"])
    assert checker.push("one <") == ("one ", None)
    assert checker.push("b> two\n") == ("<b> two", None)
    assert checker.push("three</") == ("\nthree", None)
    assert checker.push("s> four\n\n") == ("", "</s>")
    assert checker.push("more") == ("", "</s>")
    assert checker.finish() == ""


def test_what_is_held_comes_out_at_the_end():
    checker = StopChecker(["abc"])
    assert checker.push("xab") == ("x", None)
    assert checker.finish() == "ab"
    assert checker.finish() == ""


def test_no_stop_strings_hold_nothing_back():
    assert StopChecker([]).push("text") == ("text", None)
    with pytest.raises(ValueError, match="empty"):
        StopChecker([""])
