"""Reasoning and tool calls out of text: whole answers by example, each cut at every position, and random ones."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from answer_formats import CALL, HERMES, TEMPLATES, XML, json_values, parser_of, read
from pocketllm.errors import RequestError
from pocketllm.text.chat import ChatTemplate
from pocketllm.text.json_scanner import as_json
from pocketllm.text.markup import markup_of, opens_thinking
from pocketllm.text.output_parser import make_output_parser
from pocketllm.text.stream import TextStream
from tagged_tokenizer import TAGS, tagged_tokenizer
from test_text_chat import QWEN_STYLE

# family, text, content, reasoning, calls
CASES = [
    ("plain", "<think>a</think> <tool_call> b \n", "<think>a</think> <tool_call> b \n", "", []),
    ("hermes", "<think>a</think>\n\nb", "<think>a</think>\n\nb", "", []),
    # reasoning
    ("qwen3", "<think>\nLet me.\n\nYes.\n</think>\n\nHello.\n", "Hello.\n", "Let me.\n\nYes.", []),
    ("qwen3", "Hello <think>a</think>", "Hello <think>a</think>", "", []),
    ("qwen3", " \n Hello ", " \n Hello ", "", []),
    ("qwen3", "\n<think></think>\n", "", "", []),
    ("qwen3", "<think>\n<think>\na</think>b</think>c", "b</think>c", "a", []),
    ("qwen3", "</think>\n\nHi", "Hi", "", []),
    ("qwen3", "<think>a</think></think>\n b", "b", "a", []),
    ("qwen3", "<thin", "<thin", "", []),
    ("qwen3", "<think>never <ended", "", "never <ended", []),
    ("qwen3.5", "hm\n</think>\n\nHi", "Hi", "hm", []),
    ("qwen3.5", "<think>\nhm</think>Hi", "Hi", "hm", []),
    ("qwen3.5", "a < b </thin</think>", "", "a < b </thin", []),
    ("qwen3.5", "only reasoning \n", "", "only reasoning \n", []),
    ("qwen3.5", "</think>\n\nHi </think>", "Hi </think>", "", []),
    # hermes calls
    ("hermes", HERMES, "", "", [CALL]),
    ("hermes", f"Sure.\n{HERMES}\n{HERMES}\n", "Sure.", "", [CALL, CALL]),
    ("hermes", f"{HERMES}\nDone. ", "Done. ", "", [CALL]),
    ("hermes", f"a\n{HERMES}\n b", "a\n\n b", "", [CALL]),
    ("hermes", HERMES.replace("\n", ""), "", "", [CALL]),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", "", [CALL]),
    ("hermes", HERMES.removesuffix("call>"), "</tool_", "", [CALL]),
    ("hermes", f"{HERMES}{HERMES}", "", "", [CALL, CALL]),
    (
        "hermes",
        '<tool_call>{"arguments": {"s":"x"}, "id": [{}], "name": "f"}</tool_call>',
        "",
        "",
        [("f", '{"s":"x"}')],
    ),
    ("hermes", '<tool_call>{"name":"get-time"}</tool_call>', "", "", [("get-time", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', "", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"s\\": 1}"}</tool_call>', "", "", [("f", '{"s": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "}]{[\\"\\\\ \\u00e9 </tool_call> é", "a": [[], {"k": -1.5e3}]}}',
        "",
        "",
        [("f", '{"s": "}]{[\\"\\\\ \\u00e9 </tool_call> é", "a": [[], {"k": -1.5e3}]}')],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{"s":"a\nb\t"}}', "", "", [("f", '{"s":"a\\nb\\t"}')]),
    # what looks like a hermes call and is none
    ("hermes", "Use <tool_call> tags.", "Use <tool_call> tags.", "", []),
    ("hermes", "a <tool_cal", "a <tool_cal", "", []),
    ("hermes", f"<tool_call>\n{HERMES}", "<tool_call>", "", [CALL]),
    ("hermes", f"<tool_call>{{'name'}} {HERMES}", "<tool_call>{'name'}", "", [CALL]),
    ("hermes", HERMES.replace('"f"', '"unknown"'), HERMES.replace('"f"', '"unknown"'), "", []),
    ("hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', "", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', "", []),
    ("hermes", '<tool_call>{"name": "f", "arguments": 3}', '<tool_call>{"name": "f", "arguments": 3}', "", []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "\\ud800"}',
        '<tool_call>{"name": "f", "arguments": "\\ud800"}',
        "",
        [],
    ),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', "", []),
    ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", "", []),
    ("hermes", "<tool_call>", "<tool_call>", "", []),
    ("hermes", "<tool_call>\n<function=f>\n</function>", "<tool_call>\n<function=f>\n</function>", "", []),
    # a call that breaks when its arguments have begun keeps what it had, and the rest is text
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "x', "", "", [("f", '{"s": "x')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"i": 12', "12", "", [("f", '{"i": ')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"i": 1,}}</tool_call>',
        "}}</tool_call>",
        "",
        [("f", '{"i": 1,')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"i": nil}}' + HERMES, "nil}}", "", [("f", '{"i": '), CALL]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"i": nil}} ok', "nil}} ok", "", [("f", '{"i": ')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}; ok', "; ok", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}', ', "arguments": {}}', "", [("f", "{}")]),
    # XML calls
    ("coder", XML, "", "", [CALL]),
    ("coder", f"Sure.\n\n{XML}\n{XML}\nDone", "Sure.\n\n\n\nDone", "", [CALL, CALL]),
    ("coder", XML.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), "", "", [CALL]),
    ("coder", XML.replace("\n", ""), "", "", [CALL]),
    ("coder", "<tool_call>\n<function=get-time>\n</function>\n</tool_call>", "", "", [("get-time", "{}")]),
    (
        "coder",
        "<function=f>\n<parameter=s>\n\n 1\n\n</parameter>\n<parameter=i>\n-7\n</parameter>\n<parameter=x>\n2.50\n"
        "</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=a>\n[1,\n {}]\n</parameter>\n<parameter=o>\n"
        '{"k": "</p>"}\n</parameter>\n<parameter=n>\nNone\n</parameter>\n<parameter=e>\ntwo\n</parameter>\n'
        "<parameter=new>\n5\n</parameter>\n</function>",
        "",
        "",
        [
            (
                "f",
                '{"s": "\\n 1\\n", "i": -7, "x": 2.50, "b": true, "a": [1,\n {}], "o": {"k": "</p>"}, "n": null, '
                '"e": "two", "new": "5"}',
            )
        ],
    ),
    (
        "coder",
        '<function=f><parameter=s>a < b "q" \\ é </param\n</function>\n</parameter></function>',
        "",
        "",
        [("f", '{"s": "a < b \\"q\\" \\\\ é </param\\n</function>"}')],
    ),
    ("coder", "<function=f><parameter=i>\nmany\n</parameter></function>", "", "", [("f", '{"i": "many"}')]),
    # what looks like an XML call and is none
    ("coder", "Use <function=f> here", "Use <function=f> here", "", []),
    ("coder", XML.replace("=f", "=unknown"), XML.replace("=f", "=unknown"), "", []),
    ("coder", "<tool_call>\n<function=f>\n<param", "<tool_call>\n<function=f>\n<param", "", []),
    ("coder", "<tool_call>\n<function=>\n", "<tool_call>\n<function=>\n", "", []),
    ("coder", f"<tool_call>\n<function={XML}", "<tool_call>\n<function=", "", [CALL]),
    # an XML call that breaks when its parameters have begun
    ("coder", "<function=f><parameter=s>\nab\n</para", "</para", "", [("f", '{"s": "ab')]),
    ("coder", "<function=f><parameter=i>12", "<parameter=i>12", "", [("f", "{")]),
    ("coder", "<function=f><parameter=s>x</parameter>and", "and", "", [("f", '{"s": "x"')]),
    ("coder", "<function=f><parameter=a\n", "<parameter=a\n", "", [("f", "{")]),
    (
        "coder",
        "<function=f><parameter=s>x</parameter><parameter=s>y</parameter></function>",
        "<parameter=s>y</parameter></function>",
        "",
        [("f", '{"s": "x"')],
    ),
    # both
    ("qwen3", f"<think>\nhm\n</think>\n\n{HERMES}", "", "hm", [CALL]),
    ("qwen3", f"<think>\nhm\n{HERMES}\n</think>\n\nHi", "Hi", "hm", [CALL]),
    ("qwen3", "<think>\nA <tool_call> is needed.\n</think>\n\nHi", "Hi", "A <tool_call> is needed.", []),
    ("qwen3.5", f"hm</think>\n\n{XML}\n", "", "hm", [CALL]),
    ("qwen3.5", f"hm {XML}", "", "hm", [CALL]),
    ("qwen3.5", "hm <tool_call>\n<function=f>", "", "hm <tool_call>\n<function=f>", []),
    ("qwen3.5", f"hm</think>\n\nSee:\n{XML}\nthen", "See:\n\nthen", "hm", [CALL]),
]


@pytest.mark.parametrize(("family", "text", "content", "reasoning", "calls"), CASES)
def test_examples_cut_at_every_position(family, text, content, reasoning, calls):
    expected = content, reasoning, calls
    assert read(parser_of(family), [text]) == expected
    assert read(parser_of(family), text) == expected
    for cut in range(1, len(text)):
        assert read(parser_of(family), [text[:cut], text[cut:]]) == expected


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=s>", "<parameter=i>",
     "</parameter>", '{"name": "f", "arguments": ', '{"name": ', '"f"', ', "arguments": ', "{", "}", "[", "]", '"', "\\",
     ":", ",", "1", "-", "null", "s", "\n", " ", "<", ">", "/", "é", "\U0001f600", HERMES, XML]
)  # fmt: skip


def cut(text, sizes):
    start = 0
    for size in sizes:
        yield text[start : start + size]
        start += size
    yield text[start:]


@settings(max_examples=1000, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(PIECES, max_size=14).map("".join), st.lists(st.integers(0, 9)))
def test_random_text_gives_the_same_however_it_is_cut_and_loses_nothing(family, text, sizes):
    content, reasoning, calls = whole = read(parser_of(family), [text])
    assert read(parser_of(family), cut(text, sizes)) == whole
    assert read(parser_of(family), text) == whole
    if not calls:  # all of it is there but for thinking tags and whitespace
        assert bare(reasoning + content) == bare(text)
    for written in (reasoning, content):  # nothing is made up
        rest = iter(text)
        assert all(c in rest for c in written)
    for _, arguments in calls:
        assert as_json(arguments, "{") in (arguments, None)  # None: broken off


def bare(text):
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=6), json_values, max_size=4), min_size=1, max_size=3),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_hermes_calls_come_back_as_they_were_written(every, indent, ascii_only):
    written = [json.dumps({"name": "f", "arguments": a}, indent=indent, ensure_ascii=ascii_only) for a in every]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written)
    content, _, calls = read(parser_of("hermes"), text)
    assert content == ""
    assert [json.loads(arguments) for _, arguments in calls] == every


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda t: "</parameter>" not in t)
xml_arguments = st.fixed_dictionaries(
    {},
    optional={
        "s": texts,
        "i": st.integers(),
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "b": st.booleans(),
        "a": st.lists(json_values, max_size=3),
        "o": st.dictionaries(texts, json_values, max_size=3),
        "e": st.sampled_from(["one", "two"]),
        "more": texts,
    },
)


def written_as_xml(arguments):
    """As Qwen's templates write past calls: objects and lists as JSON, the rest through Python's str."""
    values = {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
        for key, value in arguments.items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


@settings(max_examples=150, deadline=None)
@given(st.lists(xml_arguments, min_size=1, max_size=3))
def test_xml_calls_come_back_with_their_types(every):
    content, _, calls = read(parser_of("coder"), "\n".join(map(written_as_xml, every)))
    assert content == ""
    back = [json.loads(arguments) for _, arguments in calls]
    assert back == every
    assert [[type(v) for v in b.values()] for b in back] == [[type(v) for v in a.values()] for a in every]


def test_arguments_are_passed_on_before_the_call_ends():
    parser = parser_of("hermes")
    assert parser.push('a <tool_call>\n{"name": "f", "argu').tool_calls == ()
    first, more = parser.push('ments": {"s": "some ').tool_calls
    assert (first.index, first.name, first.arguments) == (0, "f", "")
    assert (more.index, more.id, more.name, more.arguments) == (0, None, None, '{"s": "some ')
    assert [c.arguments for c in parser.push('text", "i": 1').tool_calls] == ['text", "i": ']

    parser = parser_of("coder")
    parser.push("<tool_call>\n<function=f>\n<parameter=s>\nsome <b>te")
    assert [c.arguments for c in parser.push("xt\n").tool_calls] == ["xt"]
    assert [c.arguments for c in parser.push("\n</parameter>\n<parameter=i>\n12").tool_calls] == ['\\n"']
    assert [c.arguments for c in parser.push("3\n</parameter>").tool_calls] == [', "i": 123']


def test_text_is_held_back_only_while_it_may_be_a_tag_or_touch_one():
    parser = parser_of("qwen3")
    shown = [parser.push(c).content for c in "a <to b \n<tool_call>x"]
    assert [text for text in shown if text] == ["a", " <to", " b", " \n<tool_call>x"]


def test_whether_it_is_reasoning_is_known_token_by_token():
    parser = parser_of("qwen3.5")
    assert parser.in_reasoning
    parser.push("hm <tool_call>\n<function=f>")
    assert parser.in_reasoning  # not a call yet
    assert not parser.has_tool_calls
    parser.push("<parameter=s>")
    assert not parser.in_reasoning
    assert parser.has_tool_calls

    parser = parser_of("qwen3")
    assert not parser.in_reasoning
    parser.push("<think>")
    assert parser.in_reasoning
    parser.push("a</think>")
    assert not parser.in_reasoning


@pytest.mark.parametrize(
    ("family", "thinking", "prompt", "opened"),
    [
        ("qwen3.5", True, None, True),
        ("qwen3.5", False, None, False),
        ("qwen3", True, None, False),
        ("plain", True, "<think>", False),
        ("qwen3.5", True, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", False, "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", True, "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("qwen3", True, "<|im_start|>assistant\n<think>\nI was think", True),
        ("qwen3", True, "<think>\n", True),
        ("qwen3", True, "say <think> now", False),
    ],
)
def test_whether_the_prompt_has_opened_the_reasoning(family, thinking, prompt, opened):
    assert parser_of(family, thinking=thinking, prompt=prompt).in_reasoning == opened


def test_a_template_that_refuses_the_trial_conversation_opens_nothing():
    template = ChatTemplate("{{ raise_exception('no') }}<think></think>")
    assert not make_output_parser(template, thinking=True, parse_tools=True).in_reasoning
    assert not opens_thinking("")


def test_without_parsing_calls_they_are_content():
    assert read(parser_of("qwen3", parse_tools=False), f"<think>a</think>{HERMES}") == (HERMES, "a", [])
    assert read(make_output_parser(None, thinking=True, parse_tools=True), HERMES) == (HERMES, "", [])
    assert read(parser_of("plain"), HERMES) == (HERMES, "", [])


def test_without_tools_every_plausible_name_counts():
    text = HERMES.replace('"f"', '"other.tool-1"')
    assert read(parser_of("hermes", tools=()), text) == ("", "", [("other.tool-1", '{"s": "x"}')])
    text = HERMES.replace('"f"', '"not a name"')
    assert read(parser_of("hermes", tools=()), text) == (text, "", [])


def test_ids_repeat_with_the_seed_only():
    def ids(seed):
        return [c.id for c in parser_of("hermes", seed=seed).push(HERMES * 3).tool_calls if c.id]

    assert len(set(ids(1))) == 3
    assert ids(1) == ids(1) != ids(2)
    assert ids(None) != ids(None)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{}], r"tools\[0\] needs a 'function' with a 'name'"),
        ([{"name": "f"}, {"function": {"name": ""}}], r"tools\[1\]"),
        ([{"function": 3}], r"tools\[0\]"),
        ([{"name": "f", "parameters": []}], r"tools\[0\] \(f\): 'parameters'"),
    ],
)
def test_wrong_tools_are_refused(tools, message):
    with pytest.raises(RequestError, match=message):
        make_output_parser(TEMPLATES["hermes"], tools=tools, thinking=False, parse_tools=True)


def test_the_qwen_style_template_of_the_chat_tests():
    markup = markup_of(ChatTemplate(QWEN_STYLE))
    assert markup.thinks
    assert "<function=" in markup.tools.openings
    assert markup.tags == TAGS


@pytest.mark.parametrize("control", [False, True])
def test_tags_reach_the_parser_even_as_control_tokens(control):
    tokenizer = tagged_tokenizer(tags_are_control=control)
    text = f"<think>a</think><|other|>{HERMES}<|im_end|>"
    parser = parser_of("qwen3")
    stream = TextStream(tokenizer, keep=parser.markup.tags)
    pieces = [stream.push([i]) for i in tokenizer.encode(text)] + [stream.finish()]
    assert read(parser, pieces) == ("", "a", [CALL])
    shown = TextStream(tokenizer).push(tokenizer.encode(text))
    assert ("<think>" in shown) is not control
