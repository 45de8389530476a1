"""Grammars: whatever the model would rather say, a completed answer has the form that was asked for."""

from __future__ import annotations

import json
import re
import sys

import jsonschema
import numpy as np
import pytest
import torch

import tiny_models
from answer_formats import TEMPLATES, TOOLS, read
from engines import drain, prompt, tokens_of
from json_schemas import SCHEMAS, SHORT, obj
from pocketllm import Engine
from pocketllm.errors import RequestError
from pocketllm.options import SamplingParams
from pocketllm.text.grammar import (
    JsonObject,
    JsonSchema,
    LarkGrammar,
    OneOf,
    Regex,
    ToolCalls,
    build_constraint,
)
from pocketllm.text.hermes import HermesSyntax
from pocketllm.text.output_parser import make_output_parser
from pocketllm.text.qwen_xml import QwenXmlSyntax
from tagged_tokenizer import END, tagged_tokenizer

TOKENIZER = tagged_tokenizer()
END_ID = TOKENIZER.token_to_id(END)


def allowed_ids(constraint) -> list[int]:
    words = constraint.allowed().numpy()
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def random_answer(constraint, seed: int, tokenizer=TOKENIZER, limit: int = 2000) -> str | None:
    """Tokens drawn evenly from what is allowed; None if the answer is not complete by then."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(limit):
        token = int(rng.choice(allowed_ids(constraint)))
        if token in tokenizer.eos_ids:
            return tokenizer.decode(ids)
        ids.append(token)
        constraint.accept(token)
        if constraint.finished:
            return tokenizer.decode(ids)
    return None


def is_taken(constraint, text: str, tokenizer=TOKENIZER) -> bool:
    """Whether the constraint lets a model write exactly `text` and end there."""
    for token in tokenizer.encode(text, add_special=False):
        if constraint.finished or token not in allowed_ids(constraint):
            return False
        constraint.accept(token)
    return constraint.finished or tokenizer.eos_ids[0] in allowed_ids(constraint)


def check(text: str, schema) -> None:
    jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_validate(name):
    for seed in range(6):
        text = random_answer(build_constraint(TOKENIZER, JsonSchema(SCHEMAS[name])), seed)
        assert text is not None
        check(text, SCHEMAS[name])


@pytest.mark.parametrize("thinking", [False, True])
def test_a_models_answers_validate_at_any_temperature(tmp_path, thinking):
    """All schemas at once through the engine, greedy and hot, the closing characters made likely so that answers end."""
    folder, _ = tiny_models.make("qwen3", tmp_path, eos_token_id=END_ID)
    running = Engine(folder, max_batch_size=8, max_context=512, kernels="reference", vocab_limit=TOKENIZER.vocab_size)
    closing = {TOKENIZER.encode(c)[0]: 6.0 for c in '"}]'} | {TOKENIZER.encode(c)[0]: -6.0 for c in " \t\n"}
    wanted = {}
    for number, (name, schema) in enumerate(SCHEMAS.items()):
        for temperature in (0.0, 2.0):
            after = {"starts_after": "</think>", "opened": number % 2 == 0, "thinking_budget": 10} if thinking else {}
            params = SamplingParams(max_tokens=300, temperature=temperature, logit_bias=closing, seed=number)
            request = running.add_request(
                prompt(5, seed=number, vocab=256),
                params,
                constraint=build_constraint(TOKENIZER, JsonSchema(schema), **after),
            )
            wanted[request] = name, temperature
    outputs = drain(running)
    complete = dict.fromkeys((0.0, 2.0), 0)
    for request, (name, temperature) in wanted.items():
        *_, last = outputs[request]
        assert last.error is None
        if last.finish_reason == "stop":
            reasoning, _, answer = TOKENIZER.decode(tokens_of(outputs[request])).rpartition("</think>")
            assert not (reasoning and not thinking)
            check(answer, SCHEMAS[name])
            complete[temperature] += 1
    assert min(complete.values()) > len(SCHEMAS) * 0.7


def test_a_json_object_on_one_line():
    for right in ('{"a": {"b": [1, 2.5e3, "é \\n </think>"]}}', '{"a":1,"b": [],"c":{}}', "{}"):
        assert is_taken(build_constraint(TOKENIZER, JsonObject()), right)
    for wrong in ("[1]", '{"a":  1}', '{"a": 1 }', '{"a": 1\n}', '{"a": 1}\n', '{"a": 1', "{'a': 1}", '{"a" : 1}'):
        assert not is_taken(build_constraint(TOKENIZER, JsonObject()), wrong)


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (Regex("[ab]+/\n?"), ["a/", "abba/\n"], ["", "a", "a/b", "xa/"]),
        (Regex("a|bc"), ["a", "bc"], ["ac", "abc", "c"]),
        (Regex(r"a\/b\\"), ["a/b\\"], ["a\\/b\\"]),
        (LarkGrammar('start: "x" list\nlist: /[0-9]/ ("," list)?'), ["x1", "x1,2,3"], ["x", "x1,", "1"]),
        (
            OneOf((Regex("yes|no"), JsonSchema(obj(n={"type": "integer"})))),
            ["yes", '{"n": 4}'],
            ["maybe", "{}", "yes "],
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["", "hm </thin\n</think>", "</think>\n\n"])
def test_forms_take_what_they_say(form, right, wrong, prefix):
    after = "</think>" if prefix else None
    for text in right:
        assert is_taken(build_constraint(TOKENIZER, form, starts_after=after), prefix + text), text
    for text in wrong:
        assert not is_taken(build_constraint(TOKENIZER, form, starts_after=after), prefix + text), text


def test_reasoning_that_the_prompt_has_not_opened_may_be_left_out():
    def constraint():
        return build_constraint(TOKENIZER, Regex("a+"), starts_after="</think>", opened=False)

    assert is_taken(constraint(), "aa")
    assert is_taken(constraint(), "<think>\nb\n</think>\n\naa")
    assert not is_taken(constraint(), "b</think>a")
    assert not is_taken(constraint(), "<think>aa")


def test_a_token_may_reach_across_the_end_of_the_reasoning():
    """A vocabulary without `</think>`: the tag is written in pieces, the last of which holds more than the tag."""
    tokenizer = tagged_tokenizer(tags=False)
    text = "so\n</think>\n\na1"
    assert b">\n\n" in [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
    assert is_taken(build_constraint(tokenizer, Regex("a[0-9]"), starts_after="</think>"), text, tokenizer)
    assert not is_taken(build_constraint(tokenizer, Regex("a[0-9]"), starts_after="</think>"), text + "2", tokenizer)
    for seed in range(3):
        constraint = build_constraint(tokenizer, Regex("[a-c]{4}[0-9]"), starts_after="</think>", thinking_budget=6)
        answer = random_answer(constraint, seed, tokenizer)
        assert re.search("</think>\n\n[ \t\r\n]*[a-c]{4}[0-9]$", answer), answer


# -- calls -------------------------------------------------------------------------------------------------------------

SYNTAXES = {"hermes": HermesSyntax(), "coder": QwenXmlSyntax()}
FUNCTIONS = {
    "typed": obj(3, i={"type": "integer", "minimum": 3}, s=SHORT, e={"enum": ["a b", 'c"']}, b={"type": "boolean"}),
    "texts": obj(1, s={"type": "string", "minLength": 2, "maxLength": 4}, p={"type": "string", "pattern": "^[a-c/]+$"}),
    "nested": {
        **obj(o={"$ref": "#/$defs/point"}, a={"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2}),
        "$defs": {"point": obj(x={"type": "integer"}, y={"type": ["integer", "null"]})},
    },
    "odd": obj(a={"type": "array", "items": {"type": "boolean"}, "contains": {}, "minContains": 0, "maxItems": 3}),
    "nothing": {},
    "find /ä": obj(q={"type": "string", "maxLength": 3}),
}
FUNCTION_TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in FUNCTIONS.items()]


def calls_of(family: str, text: str) -> list[tuple[str, str]]:
    parser = make_output_parser(TEMPLATES[family], tools=FUNCTION_TOOLS, thinking=False, parse_tools=True)
    content, _, calls = read(parser, [text])
    assert content == ""
    return calls


@pytest.mark.parametrize("family", SYNTAXES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_required_calls_parse_and_validate(family, name):
    for seed in range(4):
        form = ToolCalls(SYNTAXES[family], FUNCTION_TOOLS, name=name, parallel=False)
        text = random_answer(build_constraint(TOKENIZER, form), seed)
        ((called, arguments),) = calls_of(family, text)
        assert called == name
        check(arguments, FUNCTIONS[name])


@pytest.mark.parametrize("family", SYNTAXES)
def test_any_function_and_several_calls_only_where_allowed(family):
    one = {
        "hermes": '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>',
        "coder": "<tool_call>\n<function=nothing>\n</function>\n</tool_call>",
    }[family]
    other = one.replace("nothing", "unknown")

    def constraint(**options):
        return build_constraint(TOKENIZER, ToolCalls(SYNTAXES[family], FUNCTION_TOOLS, **options))

    assert is_taken(constraint(), one)
    assert is_taken(constraint(), f"{one}\n{one}")
    assert is_taken(constraint(parallel=False), one)
    assert not is_taken(constraint(parallel=False), f"{one}\n{one}")
    assert not is_taken(constraint(), other)
    assert not is_taken(constraint(), "Hello")
    assert not is_taken(constraint(), one + "Hello")
    assert not is_taken(constraint(name="texts"), one)


@pytest.mark.parametrize("family", SYNTAXES)
def test_arguments_nobody_declared_are_not_written(family):
    tools = [{"name": "g", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}]
    texts = {
        "hermes": '<tool_call>\n{"name": "g", "arguments": {"%s": 1}}\n</tool_call>',
        "coder": "<tool_call>\n<function=g>\n<parameter=%s>\n1\n</parameter>\n</function>\n</tool_call>",
    }
    for key, taken in (("n", True), ("m", False)):
        assert is_taken(build_constraint(TOKENIZER, ToolCalls(SYNTAXES[family], tools)), texts[family] % key) == taken


def test_a_text_argument_may_be_any_text_but_the_closing_tag():
    form = ToolCalls(QwenXmlSyntax(), TOOLS, name="f")
    call = "<tool_call>\n<function=f>\n<parameter=s>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert is_taken(build_constraint(TOKENIZER, form), call % 'two\n\nlines "<b>" \\ </param> é')
    assert not is_taken(build_constraint(TOKENIZER, form), call % "a</parameter>b")
    tools = [
        {"name": "f", "parameters": {"properties": {"s": {"type": "string", "pattern": "a|^b"}}, "required": ["s"]}}
    ]
    form = ToolCalls(QwenXmlSyntax(), tools)  # anchored alternatives are left to the tool
    assert is_taken(build_constraint(TOKENIZER, form), call % "a")


def test_limits_of_texts_do_not_touch_other_types():
    call = "<tool_call>\n<function=f>\n<parameter=n>\n%s\n</parameter>\n</function>\n</tool_call>"
    for kind, taken in (("string", False), ("integer", True)):
        tools = [{"name": "f", "parameters": obj(n={"type": kind, "maxLength": 1})}]
        assert is_taken(build_constraint(TOKENIZER, ToolCalls(QwenXmlSyntax(), tools)), call % "12") == taken


# -- what is refused, and the tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (JsonSchema({"type": "array", "uniqueItems": True}), 'JSON schema: Unimplemented keys: ."uniqueItems"'),
        (JsonSchema({"not": {}}), "Unimplemented keys"),
        (JsonSchema({"type": "strin"}), "JSON schema: Invalid type: strin"),
        (JsonSchema({"type": "string", "format": "nope"}), "Unknown format: nope"),
        (JsonSchema({"$ref": "#/$defs/x"}), "does not exist"),
        (JsonSchema({"$ref": "https://example.org/x"}), "does not fetch"),
        (JsonSchema({"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
        (JsonSchema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (JsonSchema([]), "must be an object, not list"),
        (Regex("["), "unclosed character class"),
        (Regex("(?<=a)b"), "look-around"),
        (LarkGrammar("start: missing"), "unknown name"),
        (LarkGrammar("what"), "Expected token"),
        (ToolCalls(None, TOOLS), "shows no syntax"),
        (ToolCalls(HermesSyntax(), []), "no tools"),
        (ToolCalls(HermesSyntax(), TOOLS, name="g"), "no tool is called 'g'"),
        (ToolCalls(HermesSyntax(), [{"name": "g", "parameters": {"type": "objct"}}]), "Invalid type: objct"),
        (OneOf((Regex("a"), Regex("["))), "unclosed character class"),
    ],
)
@pytest.mark.parametrize("starts_after", [None, "</think>"])
def test_what_is_no_form_is_refused_with_the_reason(form, message, starts_after):
    with pytest.raises(RequestError, match=message) as caught:
        build_constraint(TOKENIZER, form, starts_after=starts_after)
    assert "answer_0" not in str(caught.value)  # our own grammar's text


def test_nothing_to_constrain_is_refused():
    with pytest.raises(RequestError, match="nothing to constrain"):
        build_constraint(TOKENIZER, None)
    with pytest.raises(RequestError, match="needs a model that thinks"):
        build_constraint(TOKENIZER, Regex("a"), thinking_budget=5)


def test_a_wrong_token_is_refused_then_and_ever_after():
    constraint = build_constraint(TOKENIZER, Regex("ab"))
    with pytest.raises(RequestError, match="can't go on"):
        constraint.accept(TOKENIZER.encode("x")[0])
    with pytest.raises(RequestError, match="can't go on"):
        constraint.allowed()


def test_a_tokenizer_without_an_end_is_refused():
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        build_constraint(tagged_tokenizer(ends=False), Regex("a"))


def test_without_llguidance_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pocketllm\[server\]"):
        build_constraint(tagged_tokenizer(), Regex("a"))


def test_the_vocabulary_is_prepared_once():
    tokenizer = tagged_tokenizer()
    build_constraint(tokenizer, Regex("a"))
    first = tokenizer.for_grammars
    build_constraint(tokenizer, Regex("b"))
    assert tokenizer.for_grammars is first


@pytest.mark.parametrize("control", [False, True])
def test_tags_are_text_and_control_tokens_are_not(control):
    tokenizer = tagged_tokenizer(tags_are_control=control)
    begin, end = tokenizer.token_to_id("<tool_call>"), tokenizer.token_to_id(END)
    constraint = build_constraint(tokenizer, ToolCalls(HermesSyntax(), FUNCTION_TOOLS))
    assert begin in allowed_ids(constraint)
    constraint = build_constraint(tokenizer, JsonSchema({"const": f"a{END}b<|other|>"}))
    ids: list[int] = []
    while not constraint.finished:
        options = allowed_ids(constraint)
        assert not {end, tokenizer.token_to_id("<|other|>")} & set(options)
        ids.append(max(options, key=lambda i: len(tokenizer.token_bytes(i))))
        constraint.accept(ids[-1])
    assert tokenizer.decode(ids) == f'"a{END}b<|other|>"'


def test_the_mask_covers_the_vocabulary():
    mask = build_constraint(TOKENIZER, Regex("(?s:.*)")).allowed()
    assert mask.dtype == torch.int32
    assert mask.shape == (-(-TOKENIZER.vocab_size // 32),)
