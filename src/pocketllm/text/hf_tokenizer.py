"""The tokenizer of a Hugging Face model folder.

tokenizer.json is complete; tokenizer_config.json names the special tokens and may hold the chat template, which newer
checkpoints keep in chat_template.jinja instead (that file wins, as it does in transformers).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from pocketllm.errors import ModelError
from pocketllm.text.tokenizer_data import TokenizerData

_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_hf_tokenizer(folder: Path) -> TokenizerData:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder.name} has no tokenizer.json: a model folder needs one (or use a GGUF file)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for any malformed file
        raise ModelError(f"{path.name} can't be read: {error}") from error
    if not isinstance(backend.decoder, decoders.ByteLevel):
        kind = type(backend.decoder).__name__
        raise ModelError(f"{path.name} decodes with {kind}: only byte-level BPE (as of Qwen) is supported")
    backend.no_padding()  # a file may carry the settings of its last training batch
    backend.no_truncation()

    config = _read_json(folder / "tokenizer_config.json")
    named = {**_read_json(folder / "special_tokens_map.json"), **config}
    special = {name: _content(named[name]) for name in _NAMES if named.get(name)}

    def token_ids(name: str) -> tuple[int, ...]:
        if name not in special:
            return ()
        token_id = backend.token_to_id(special[name])
        if token_id is None:
            raise ModelError(f"{name} is {special[name]!r}, which tokenizer.json does not have")
        return (token_id,)

    return TokenizerData(
        backend=backend,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_id=next(iter(token_ids("bos_token")), None),
        eos_ids=token_ids("eos_token"),
        special_tokens=special,
        chat_template=_chat_template(folder, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must hold a JSON object")
    return value


def _content(token: str | dict[str, Any]) -> str:
    """A special token is written as its text, or as an object with the text under `content`."""
    return token if isinstance(token, str) else str(token["content"])


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ModelError(f"tokenizer_config.json has chat templates {sorted(named)} but none called 'default'")
        template = named["default"]
    return template
