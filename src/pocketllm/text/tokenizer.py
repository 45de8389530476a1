"""`Tokenizer`: text to token ids and back.

Encoding is the `tokenizers` package's. Decoding is done here, because a stream needs what a whole text does not: the
bytes of one token. In byte-level BPE every token *is* a byte string, so the text of any ids is the UTF-8 decoding of
their concatenation; the incremental detokenizer uses the same bytes, and the two can't disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pocketllm.errors import ModelError, RequestError
from pocketllm.text.gguf_tokenizer import load_gguf_tokenizer
from pocketllm.text.hf_tokenizer import load_hf_tokenizer
from pocketllm.text.tokenizer_data import TokenizerData

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: each byte is written as one printable character, the byte's own where that is printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class Tokenizer:
    """
    vocab_size      number of real ids: ids from here on are padding of the model's output matrix, never to be sampled
    bos_id, eos_ids begin of sequence (or None); the tokens that this file says end a generation
    special_ids     control tokens: read in a text by `encode`, left out of a text by `decode`
    special_tokens  "bos_token" -> its text, ...: the names a chat template may use
    chat_template   Jinja source, or None
    """

    def __init__(self, data: TokenizerData) -> None:
        self._backend = data.backend
        self.vocab_size = data.vocab_size
        self.bos_id = data.bos_id
        self.eos_ids = data.eos_ids
        self.special_tokens = data.special_tokens
        self.chat_template = data.chat_template
        added = data.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {i: token.content.encode() for i, token in added.items()}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special`: also the tokens the model wants around a text (Qwen: none)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text has half a surrogate pair at {error.start}: it must be Unicode") from error
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 come out as U+FFFD."""
        skipped = self.special_ids if skip_special else frozenset[int]()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; of an id that the vocabulary leaves out, none."""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"token id {token_id}: this tokenizer has ids 0 to {self.vocab_size - 1}")
            known = self._bytes[token_id] = _to_bytes(self._backend.id_to_token(token_id) or "")
        return known

    def token_to_id(self, token: str) -> int | None:
        """Id of the token with exactly this text (as tokenizer.json writes it), or None."""
        return self._backend.token_to_id(token)

    @cached_property
    def for_grammars(self) -> LLTokenizer:
        """This vocabulary as llguidance's: built once, at its first use. RequestError if there can be none."""
        from pocketllm.text.grammar_tokenizer import grammar_tokenizer

        return grammar_tokenizer(self)


def _to_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[c] for c in token)
    except KeyError:  # not in the alphabet: plain text (the `tokenizers` package reads such tokens so, too)
        return token.encode()


def load_tokenizer(path: Path) -> Tokenizer:
    """From a Hugging Face model folder, or from a GGUF file. ModelError says what is missing."""
    if path.is_dir():
        return Tokenizer(load_hf_tokenizer(path))
    if path.suffix == ".gguf" and path.is_file():
        return Tokenizer(load_gguf_tokenizer(path))
    raise ModelError(f"{path.name} is neither a model folder nor a .gguf file")
