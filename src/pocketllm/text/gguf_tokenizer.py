"""The tokenizer of a GGUF file: byte-level BPE rebuilt from its tokens, merges and token types.

A GGUF file does not hold the regular expressions that split a text before the merges; it names them
(`tokenizer.ggml.pre`). The patterns below are those of the model families' own tokenizer.json files, and for `default`
the four passes that this name stands for in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pocketllm.errors import ModelError
from pocketllm.text.tokenizer_data import TokenizerData
from pocketllm.weights.gguf_file import GgufFile

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _PreTokenizer:
    """How a text is cut before the merges: each pattern in turn cuts the pieces that the one before has left."""

    patterns: tuple[str, ...]
    nfc: bool = False  # Unicode composition first
    whole_words: bool = False  # a piece that is itself a token is taken whole, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _PreTokenizer(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        whole_words=True,
        add_bos=True,
    ),
    "qwen2": _PreTokenizer(
        (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        nfc=True,
    ),
    # Qwen3.5 and later: combining marks (\p{M}) belong to words, not to punctuation.
    "qwen35": _PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
}

# A GGUF file has no generation_config.json, where these families list their second end-of-sequence token.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>")


def load_gguf_tokenizer(path: Path) -> TokenizerData:
    """Read the tokenizer of a GGUF file. ModelError if it is no byte-level BPE, is incomplete or can't be rebuilt."""
    return tokenizer_from_metadata(GgufFile(path).metadata)


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> TokenizerData:
    """`metadata`: the pairs `tokenizer.*` of a GGUF file."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(f"tokenizer.ggml.model is {model!r}: only byte-level BPE ('gpt2') is supported")
    name = str(metadata.get("tokenizer.ggml.pre"))
    if name not in PRE_TOKENIZERS:
        raise ModelError(f"tokenizer.ggml.pre is {name!r}; known: {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]
    tokens, types, merges = (_required(metadata, f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    if len(tokens) != len(types):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types")

    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    backend = _byte_level_bpe(pre, vocab, merges)
    control, user_defined = (
        [token for token, of_token in zip(tokens, types, strict=True) if of_token == kind]
        for kind in (_CONTROL, _USER_DEFINED)
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])  # not in decoded text
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in user_defined])

    def token_id(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and value >= len(tokens):
            raise ModelError(f"tokenizer.ggml.{key}_token_id is {value}, but there are {len(tokens)} tokens")
        return value

    named = {"bos": token_id("bos"), "eos": token_id("eos"), "pad": token_id("padding"), "unk": token_id("unknown")}
    ends = [named["eos"], token_id("eot"), *(vocab[t] for t in _END_TOKENS if t in control)]
    around = {
        end: named[end] if metadata.get(f"tokenizer.ggml.add_{end}_token", default) else None
        for end, default in (("bos", pre.add_bos), ("eos", False))
    }
    if any(i is not None for i in around.values()):
        backend.post_processor = _around(tokens, around["bos"], around["eos"])
    return TokenizerData(
        backend=backend,
        vocab_size=max(vocab.values(), default=-1) + 1,
        bos_id=named["bos"],
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        special_tokens={f"{key}_token": tokens[i] for key, i in named.items() if i is not None},
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ModelError(f"the GGUF file has no {key}: its tokenizer is incomplete")
    return metadata[key]


def _byte_level_bpe(pre: _PreTokenizer, vocab: dict[str, int], merges: list[str]) -> tokenizers.Tokenizer:
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.whole_words))
    except Exception as error:  # the package raises bare Exception for a merge whose token does not exist
        raise ModelError(f"the GGUF file's merges do not fit its tokens: {error}") from error
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _around(tokens: list[str], bos: int | None, eos: int | None) -> processors.TemplateProcessing:
    """Put `bos` before and `eos` after every text (None: leave out)."""
    # "$A" is the text. Tokens go by a name of our own: the package reads ":" and "$" in a name as syntax.
    names = {name: i for name, i in (("BOS", bos), ("EOS", eos)) if i is not None}
    single = " ".join(part for part in ("BOS" * ("BOS" in names), "$A", "EOS" * ("EOS" in names)) if part)
    special = [{"id": name, "ids": [i], "tokens": [tokens[i]]} for name, i in names.items()]
    return processors.TemplateProcessing(single=single, special_tokens=special)
