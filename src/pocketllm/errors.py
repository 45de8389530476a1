"""Every error a caller may want to tell apart. All messages say what would be right.

Errors of one request never end the engine: they are carried by that request's result (see `engine.Engine`).
"""

from __future__ import annotations


class PocketLLMError(Exception):
    """Base of all errors raised on purpose by this package."""


class OptionError(PocketLLMError, ValueError):
    """An option or sampling parameter is unknown or has an impossible value."""


class ModelError(PocketLLMError):
    """A model can't be read: not found, an unsupported architecture, or a file that is corrupt or incomplete."""


class MemoryPlanError(PocketLLMError):
    """The memory plan does not fit the device. Raised before anything is allocated; names settings that fit."""


class SlotError(PocketLLMError):
    """A slot is used in a way its state does not allow (not acquired, still generating, awaiting a commit)."""


class NoFreeSlot(SlotError):
    """All slots are in use."""


class OutOfPages(SlotError):
    """The page pool can't serve the reservation asked for."""


class QueueFull(PocketLLMError):
    """The waiting queue is at its limit; nothing was queued."""


class RankError(PocketLLMError):
    """A tensor-parallel rank has failed or is gone. The engine can't go on: build a new one."""


class LostRank(RankError):
    """A rank missed another one in a collective: the consequence of a failure, not its cause."""


class RequestError(PocketLLMError):
    """One request can't be served (prompt too long, bad token id, non-finite logits ...). The others go on."""
