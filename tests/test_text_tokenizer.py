"""The tokenizer of a GGUF file and of a model folder, against transformers' own conversion of the same GGUF file."""

from __future__ import annotations

import importlib
import json
import struct
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers

from pocketllm.errors import ModelError, RequestError
from pocketllm.text.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_metadata
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer
from pocketllm.weights.gguf_file import GgufFile

HARD_TEXTS = [
    "",
    " ",
    "Hello, world! I'll say it's 3.14159 or 1234567 (WE'RE sure).",
    "a  b   c\t\td\n\n\ne\r\nf \n g",
    "def f(x: int) -> str:\n    return f'{x ** 2:>8}'  # comment\n\n\nclass A:\n\tpass\n",
    "日本語と中文 한국어 สวัสดีครับ हिन्दी संस्कृतम् العربية עברית",
    "👩‍👩‍👧‍👦 🇩🇪 ☂️ \U0001d518\U0001d52b \u200b\ufeff",
    "e\u0301 n\u0303 \u0301\u0302!\u0301 é ½ ² Ⅷ ③ ٣",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "\u2019s 's 'S '\u017f 'LL it'd",
    "\u00a0\u3000\u2028x  ",
]


@pytest.fixture(scope="module")
def smollm(embedded_model: Path) -> Tokenizer:
    return load_tokenizer(embedded_model)


@pytest.fixture(scope="module")
def oracle(embedded_model: Path) -> tokenizers.Tokenizer:
    """transformers converts tokens and merges but not the splitting: set here as in SmolLM2's tokenizer.json."""
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(embedded_model.parent, gguf_file=embedded_model.name)._tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


def test_agrees_with_transformers_on_hard_texts(smollm, oracle):
    for text in HARD_TEXTS:
        ids = smollm.encode(text)
        assert ids == oracle.encode(text).ids, text
        for skip in (True, False):
            assert smollm.decode(ids, skip_special=skip) == oracle.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_agrees_with_transformers_on_any_text(smollm, oracle, text):
    assert smollm.encode(text) == oracle.encode(text).ids


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=20), st.booleans())
def test_decodes_any_ids_as_the_tokenizers_package_does(smollm, oracle, ids, skip):
    assert smollm.decode(ids, skip_special=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_facts_of_the_embedded_model(smollm):
    assert smollm.vocab_size == 49152
    assert smollm.token_to_id("<|im_start|>") == smollm.bos_id == 1
    assert smollm.eos_ids == (2, 0)  # <|im_end|> by the file, <|endoftext|> by name
    assert smollm.special_ids == frozenset(range(17))
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm.token_to_id("no such token") is None
    assert "<|im_start|>" in smollm.chat_template
    assert smollm.encode("a") == smollm.encode("a", add_special=False)  # it adds nothing


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Qwen's own patterns, as the model classes of transformers state them.
QWEN_PATTERNS = {
    "qwen2": "transformers.models.qwen2.tokenization_qwen2",
    "qwen35": "transformers.models.qwen3_5.tokenization_qwen3_5",
}


def metadata(pre: str, **changes: object) -> dict[str, object]:
    """A vocabulary of the 256 bytes and a few merges, <|im_end|> (control), <tool_call> (user-defined), padding."""
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "! !", "Ċ Ċ", "Ġ Ġ"]
    tokens = [*ALPHABET, *(m.replace(" ", "") for m in merges), "<|im_end|>", "<tool_call>", "[PAD266]", "[PAD267]"]
    pairs = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": (1,) * (len(tokens) - 4) + (3, 4, 5, 5),
        "eos_token_id": 264,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in pairs.items() if value is not None}


def build(pre: str, **changes: object) -> Tokenizer:
    return Tokenizer(tokenizer_from_metadata(metadata(pre, **changes)))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """How the text is cut before the merges."""
    backend = tokenizer._backend
    text = backend.normalizer.normalize_str(text) if backend.normalizer else text
    byte_level = decoders.ByteLevel()
    return [byte_level.decode([piece]) for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


TOKENIZERS = {name: build(name) for name in PRE_TOKENIZERS}


@pytest.mark.parametrize("name", QWEN_PATTERNS)
@settings(max_examples=200, deadline=None)
@given(
    text=st.text(
        st.one_of(st.sampled_from("aZ1٣½'sLl \t\r\n!_\u0301\u0903é中👍"), st.characters(codec="utf-8")), max_size=24
    )
)
def test_qwen_texts_are_cut_as_the_model_family_does(name, text):
    pattern = importlib.import_module(QWEN_PATTERNS[name]).PRETOKENIZE_REGEX
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    composed = normalizers.NFC().normalize_str(text)
    assert pieces(TOKENIZERS[name], text) == [piece for piece, _ in split.pre_tokenize_str(composed)]


DIGITS = ["1", "2", "3", "4", "5", "6"]
CUTS = {
    "gpt-2": ["I", "'ll", " pay", " 123456", "!?", "\n", "\n", "e", "\u0301", "x"],
    "smollm": ["I", "'ll", " pay", " ", *DIGITS, "!?", "\n", "\n", "e", "\u0301", "x"],
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "456", "!?\n\n", "e", "\u0301x"],
    "qwen2": ["I", "'ll", " pay", " ", *DIGITS, "!?\n\n", "éx"],
    "qwen35": ["I", "'ll", " pay", " ", *DIGITS, "!?\n\n", "éx"],
}


@pytest.mark.parametrize("name", CUTS)
def test_how_each_family_cuts(name):
    assert pieces(TOKENIZERS[name], "I'll pay 123456!?\n\ne\u0301x") == CUTS[name]


def test_default_cuts_punctuation_first_and_digits_in_threes():
    assert pieces(TOKENIZERS["default"], "I'll pay $1234, ok") == [
        "I",
        "'",
        "ll",
        " pay",
        " ",
        "$",
        "123",
        "4",
        ",",
        " ok",
    ]


def test_combining_marks_belong_to_words_from_qwen35_on():
    text = "x\u0323\u0324"  # marks that compose with nothing further
    composed = unicodedata.normalize("NFC", text)
    assert pieces(TOKENIZERS["qwen35"], text) == [composed]
    assert len(pieces(TOKENIZERS["qwen2"], text)) > 1
    assert pieces(TOKENIZERS["qwen35"], "!!\u0301") == ["!!", "\u0301"]
    assert pieces(TOKENIZERS["qwen2"], "!!\u0301") == ["!!\u0301"]


def test_whole_words_of_llama_ignore_the_merges():
    changes = {"merges": ["Ġ t", "h e"], "tokens": None}
    tokens = [*ALPHABET, "Ġt", "he", "Ġthe"]
    changes |= {"tokens": tokens, "token_type": (1,) * len(tokens), "eos_token_id": None}
    assert build("llama-bpe", **changes).encode(" the") == [258]
    assert build("gpt-2", **changes).encode(" the") == [256, 257]


def test_padding_ids_are_not_real_and_user_tokens_stay_in_the_text():
    tokenizer = build("qwen2")
    assert tokenizer.vocab_size == 266
    assert tokenizer.eos_ids == (264,)
    ids = tokenizer.encode("a<tool_call>b<|im_end|>")
    assert ids[1] == 265
    assert ids[-1] == 264
    assert tokenizer.decode(ids) == "a<tool_call>b"
    assert tokenizer.decode(ids, skip_special=False) == "a<tool_call>b<|im_end|>"
    assert tokenizer.encode("[PAD266]") == [tokenizer.token_to_id(c) for c in "[PAD266]"]
    for outside in (266, -1):
        with pytest.raises(RequestError, match="0 to 265"):
            tokenizer.decode([outside])


def test_an_added_token_is_read_literally():
    tokens = [*ALPHABET, "<é>", "\uff5cx"]  # "é" is also how the alphabet writes the byte 0xE9
    tokenizer = build("qwen2", tokens=tokens, token_type=(1,) * 256 + (4, 4), merges=[], eos_token_id=None)
    assert tokenizer.decode([256, 257]) == "<é>\uff5cx"


@pytest.mark.parametrize(
    ("bos", "eos", "expected"), [(None, None, []), (True, False, [1, -1]), (True, True, [1, -1, 2])]
)
def test_tokens_around_a_text(bos, eos, expected):
    tokenizer = build("gpt-2", bos_token_id=1, eos_token_id=2, add_bos_token=bos, add_eos_token=eos)
    a = tokenizer.token_to_id("a")
    assert tokenizer.encode("a") == ([a if i == -1 else i for i in expected] or [a])
    assert tokenizer.encode("a", add_special=False) == [a]


def test_llama_adds_its_begin_token_unless_the_file_says_no():
    assert build("llama-bpe", bos_token_id=1).encode("a")[0] == 1
    assert build("llama-bpe", bos_token_id=1, add_bos_token=False).encode("a")[0] != 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "byte-level BPE"),
        ({"pre": "tekken"}, "'tekken'; known: default, gpt-2, smollm, llama-bpe, qwen2, qwen35"),
        ({"pre": None}, "known: "),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"token_type": (1, 1)}, "268 tokens but 2"),
        ({"merges": ["zz yy"]}, "do not fit"),
        ({"merges": ["z"]}, "do not fit"),
        ({"eos_token_id": 268}, "eos_token_id is 268"),
    ],
)
def test_a_bad_gguf_tokenizer_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        build(changes.pop("pre", "qwen2"), **changes)


def test_lone_surrogates_are_refused(smollm):
    with pytest.raises(RequestError, match="half a surrogate pair at 1"):
        smollm.encode("a\ud800")


def test_a_model_folder_gives_the_same_tokenizer(tmp_path, smollm):
    smollm._backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text("new")
    loaded = load_tokenizer(tmp_path)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_ids) == (49152, 1, (2,))
    assert loaded.special_ids == smollm.special_ids
    assert loaded.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert loaded.chat_template == "new"
    for text in HARD_TEXTS:
        assert loaded.encode(text) == smollm.encode(text)
        assert loaded.decode(loaded.encode(text)) == smollm.decode(smollm.encode(text))


def test_a_template_in_the_config_and_named_templates(tmp_path):
    TOKENIZERS["qwen2"]._backend.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    assert load_tokenizer(tmp_path).chat_template is None
    config.write_text(json.dumps({"chat_template": "inside"}))
    assert load_tokenizer(tmp_path).chat_template == "inside"
    rag = {"name": "rag", "template": "r"}
    config.write_text(json.dumps({"chat_template": [rag, {"name": "default", "template": "d"}]}))
    assert load_tokenizer(tmp_path).chat_template == "d"
    config.write_text(json.dumps({"chat_template": [rag]}))
    with pytest.raises(ModelError, match=r"\['rag'\] but none called 'default'"):
        load_tokenizer(tmp_path)
    config.write_text(json.dumps({"eos_token": "<|missing|>"}))
    with pytest.raises(ModelError, match=r"eos_token is '<\|missing\|>'"):
        load_tokenizer(tmp_path)
    config.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_tokenizer(tmp_path)


def test_padding_and_truncation_of_the_file_are_off(tmp_path):
    backend = build("qwen2")._backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("abcd")) == 4


def test_other_places_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="neither a model folder nor"):
        load_tokenizer(tmp_path / "absent.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="can't be read"):
        load_tokenizer(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0)], unk_id=0)).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="only byte-level BPE"):
        load_tokenizer(tmp_path)


def test_gguf_metadata_agrees_with_the_gguf_package(embedded_model):
    import gguf

    ours = GgufFile(embedded_model).metadata
    theirs = gguf.GGUFReader(embedded_model).fields
    assert set(ours) == {name for name in theirs if not name.startswith("GGUF.")}
    for name, value in ours.items():
        expected = theirs[name].contents()
        assert (list(value) if isinstance(value, tuple) else value) == expected, name


def test_broken_gguf_files_are_refused(tmp_path, embedded_model):
    path = tmp_path / "m.gguf"
    head = embedded_model.read_bytes()[:100_000]
    for data, message in [
        (b"", "can't be read as a GGUF file"),
        (b"GGML" + head[4:], "does not start with 'GGUF'"),
        (b"GGUF" + struct.pack("<I", 1) + head[8:], "version 1"),
        (head, "damaged or cut short"),
        (head[:30], "damaged or cut short"),
    ]:
        path.write_bytes(data)
        with pytest.raises(ModelError, match=message):
            load_tokenizer(path)
