"""Chat templates: rendered as transformers renders them; wrong conversations are refused with a reason."""

from __future__ import annotations

import datetime
import itertools

import pytest

from pocketllm.errors import ModelError, RequestError
from pocketllm.text.chat import ChatTemplate
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer
from pocketllm.text.tokenizer_data import TokenizerData

# In Qwen's style: tools, loops over calls and arguments, tool results in a shared user turn, thinking, refusals.
QWEN_STYLE = """
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- if ns.last_user < 0 %}
    {{- raise_exception('This conversation asks nothing.') }}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif message.role == 'system' %}
        {%- if tools %}{% continue %}{% endif %}
        {{- '<|im_start|>system\n' + message.content + eos_token + '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last_user %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {%- generation %}
        {{- message.content if message.content }}
        {%- endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' ~ name ~ '>\n' ~ (value if value is string else value | tojson) }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
    {% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{% endif %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter & <b>Köln</b> ☂",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi <b>'\"& é 👍\n\n  there  "}
ASSISTANT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 3}}},
        {"id": "2", "type": "function", "function": {"name": "weather", "arguments": {"city": "<x>", "days": [1.5]}}},
    ],
}
RESULT = {"role": "tool", "content": "22 °C", "tool_call_id": "1"}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT, USER],
    [USER, ASSISTANT],
    [USER, CALL, RESULT, RESULT],
    [SYSTEM, USER, CALL, RESULT, ASSISTANT, USER, CALL, RESULT],
]
SPECIAL = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}


@pytest.fixture(scope="module")
def smollm(embedded_model) -> Tokenizer:
    return load_tokenizer(embedded_model)


@pytest.mark.parametrize("style", ["smollm", "qwen"])
def test_renders_what_transformers_renders(style, smollm):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = smollm.chat_template if style == "smollm" else QWEN_STYLE
    template = ChatTemplate(source, SPECIAL)
    options = itertools.product(CONVERSATIONS, [None, TOOLS], [True, False], [{}, {"enable_thinking": False}])
    for messages, tools, prompt, variables in options:
        expected, _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **SPECIAL, **variables
        )
        assert template.render(messages, tools=tools, add_generation_prompt=prompt, **variables) == expected[0]


def test_the_smollm_prompt(smollm):
    text = ChatTemplate.of(smollm).render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_given_as_json_text_are_the_same_call():
    template = ChatTemplate(QWEN_STYLE, SPECIAL)
    as_text = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "x\\ny", "b": [1]}'}}],
    }
    as_object = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x\ny", "b": [1]}}}]}
    assert template.render([USER, as_text]) == template.render([USER, as_object])
    assert "<parameter=a>\nx\ny\n</parameter>\n<parameter=b>\n[1]\n" in template.render([USER, as_text])
    assert as_text["tool_calls"][0]["function"]["arguments"].startswith("{")  # the caller's message is left alone


def test_text_parts_are_joined():
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one two"


def test_tojson_keeps_characters_and_takes_transformers_options():
    template = ChatTemplate("{{ {'b': 'é<', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}")
    assert template.render([USER]) == '{"a":1,"b":"é<"}'


def test_strftime_now_is_the_date_of_today():
    before = datetime.date.today().isoformat()
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert before <= text <= datetime.date.today().isoformat()


def call(**function):
    return {"role": "assistant", "tool_calls": [{"function": function}]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\] needs a 'role'"),
        ([{"role": 3, "content": "x"}], "needs a 'role'"),
        ([{"role": "user"}], "needs 'content'"),
        ([{"role": "user", "content": None}], "needs 'content'"),
        ([{"role": "user", "content": 5}], "not int"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\] is of type 'image_url'",
        ),
        ([{"role": "user", "content": ["x"]}], "is of type 'str'"),
        ([USER, call(arguments={})], "needs a 'function' with a 'name'"),
        ([USER, call(name="f", arguments="{")], "not valid JSON"),
        ([USER, call(name="f", arguments="[1]")], "must be a JSON object"),
    ],
)
def test_wrong_messages_are_refused(messages, message):
    with pytest.raises(RequestError, match=message):
        ChatTemplate(QWEN_STYLE, SPECIAL).render(messages)


def test_a_templates_own_message_reaches_the_caller():
    with pytest.raises(RequestError, match=r"This conversation asks nothing\."):
        ChatTemplate(QWEN_STYLE, SPECIAL).render([SYSTEM])
    with pytest.raises(RequestError, match="fails on this conversation"):
        ChatTemplate("{{ 'a' + messages[0].content }}").render([call(name="f")])


def test_templates_run_in_a_sandbox():
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(RequestError, match="refuses"):
            ChatTemplate(attack).render([USER])


def test_a_model_without_or_with_a_broken_template(smollm):
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate.of(Tokenizer(TokenizerData(smollm._backend, smollm.vocab_size)))
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("{{ a }}\n{% if %}")
