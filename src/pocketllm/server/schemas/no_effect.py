"""Fields of OpenAI's and Anthropic's APIs that change nothing here: the values that are accepted for them.

ANY: they carry the client's own notes. Empty: known, not supported, and only null is accepted. What is in no list and no
schema is unknown. docs/server.md shows this table.
"""

from __future__ import annotations

from collections.abc import Mapping

Accepted = Mapping[str, tuple[object, ...] | None]

ANY = None
NOTHING: tuple[object, ...] = ()

COMMON: Accepted = {
    "user": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,  # reuse is found by content
    "prompt_cache_retention": ANY,
    "service_tier": ("auto", "default"),
}

CHAT: Accepted = {
    **COMMON,
    "metadata": ANY,
    "store": (False,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "audio": NOTHING,
    "function_call": NOTHING,  # replaced by tool_choice
    "functions": NOTHING,  # replaced by tools
    "moderation": NOTHING,
    "prediction": NOTHING,
    "web_search_options": NOTHING,
}

COMPLETION: Accepted = {"user": ANY, "best_of": (1,), "suffix": NOTHING}

RESPONSE: Accepted = {
    **COMMON,
    "background": (False,),
    "include": ([],),
    "store": (False,),
    "truncation": ("disabled",),
    "context_management": NOTHING,
    "conversation": NOTHING,
    "max_tool_calls": NOTHING,
    "moderation": NOTHING,
    "previous_response_id": NOTHING,  # nothing is stored: send the whole conversation
    "prompt": NOTHING,
    "stream_options": NOTHING,
}

MESSAGE: Accepted = {
    "metadata": ANY,
    "cache_control": ANY,  # reuse needs no marks
    "service_tier": ("auto", "standard_only"),
    "container": NOTHING,
    "context_management": NOTHING,
    "inference_geo": NOTHING,
    "mcp_servers": ([],),
    "speed": ("standard",),
}
