"""A byte tokenizer with the tags that Qwen's tokenizers have, and some tokens that reach across the edges of tags."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from pocketllm.text.tokenizer import Tokenizer
from pocketllm.text.tokenizer_data import TokenizerData

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
_MERGES = [("{", '"'), ('"', ":"), ("<", "/"), ("Ċ", "Ċ"), (">", "Ċ"), (">", "ĊĊ"), ('"', "}"), ("}", "}"), ("Ġ", "Ġ")]


def tagged_tokenizer(*, tags_are_control: bool = False, tags: bool = True, ends: bool = True) -> Tokenizer:
    """256 bytes, some pairs, then `<|im_end|>`, `<|other|>` and the tags. ends: `<|im_end|>` ends a sequence."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in _MERGES)]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, _MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (END, "<|other|>")])
    if tags:
        backend.add_tokens([AddedToken(t, special=tags_are_control, normalized=False) for t in TAGS])
    size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    end = backend.token_to_id(END)
    return Tokenizer(TokenizerData(backend, size, eos_ids=(end,) * ends))
