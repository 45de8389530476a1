"""A tiny random model that can chat: `tiny_models.make` with a byte tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tiny_models import make

END = 257  # <|im_end|>
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chat(kind: str, tmp_path: Path, **overrides: Any) -> Path:
    """The model's folder. One token a byte, then <|im_start|> and <|im_end|>."""
    folder, _ = make(kind, tmp_path, **{"eos_token_id": END, **overrides})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
