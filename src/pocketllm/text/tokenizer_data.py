"""What a tokenizer file must tell, whichever kind of file it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True)
class TokenizerData:
    backend: tokenizers.Tokenizer  # byte-level BPE
    vocab_size: int  # ids from here on are padding of the model's output matrix: never sampled, no text
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>": names of a chat template
    chat_template: str | None = None
