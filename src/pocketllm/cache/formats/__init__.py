"""KV formats by name. Every module of this folder that defines `FORMATS` is part of the choice."""

from __future__ import annotations

import importlib
import pkgutil

from pocketllm.cache.formats.base import KVFormat
from pocketllm.errors import OptionError


def _discover() -> dict[str, KVFormat]:
    found: dict[str, KVFormat] = {}
    for module in pkgutil.iter_modules(__path__):
        for kv_format in getattr(importlib.import_module(f"{__name__}.{module.name}"), "FORMATS", ()):
            found[kv_format.name] = kv_format
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes_per_token(128)))  # largest first


KV_FORMATS: dict[str, KVFormat] = _discover()


def kv_format(name: str) -> KVFormat:
    """The format called `name`; OptionError with the choices if there is none."""
    if name not in KV_FORMATS:
        raise OptionError(f"kv_cache_dtype = {name!r}: choose one of auto, {', '.join(KV_FORMATS)}")
    return KV_FORMATS[name]


__all__ = ["KV_FORMATS", "KVFormat", "kv_format"]
