"""`DecodeAhead`: the next decode pass is sent to the device before the host has seen this step's tokens.

Between two decode passes the host reads the sampled tokens, sees who has ended, plans, packs inputs and launches: a GPU
would wait for it every step. The next pass needs little of that: each request's next position is known, and its token is
on the device. So right after sampling, the pass of all requests that may go on is launched, and its logits are kept for the
next step. A request that turns out to have ended has had one token too many computed: its row is dropped. Nothing else of it
stays: whoever gets the slot next starts after it on the device, from a cleared state and with tokens of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pocketllm.engine.inputs import SlotTokens
from pocketllm.engine.passes import PassResult, PassRunner
from pocketllm.engine.request import Request, State
from pocketllm.engine.slots import SlotTable


class DecodeAhead:
    """At most one launched pass."""

    def __init__(self, passes: PassRunner, slots: SlotTable, has_state: bool) -> None:
        self._passes, self._slots, self._has_state = passes, slots, has_state
        self._logits: Tensor | None = None  # [n, V]
        self._rows: dict[int, tuple[Request, int, int]] = {}  # slot -> whose row it is, position of its token, row

    def launch(self, requests: Sequence[Request], token_ids: Tensor) -> None:
        """token_ids [n] int64: what was just sampled for the requests, which have not been told yet. Nothing is launched if
        one of them can't simply go on."""
        self.forget()
        if not requests or not all(map(self._goes_on, requests)):
            return
        items = []
        for request in requests:
            assert request.slot is not None
            start = self._slots.prepare_write(request.slot, 1)
            items.append(SlotTokens(request.slot, start, [0]))
        logits = self._passes.decode_tokens(items, [r.tokens_so_far for r in requests], token_ids)
        if logits is not None:
            self._logits = logits.clone()  # a caller may run passes of the same shape before it is used
            self._rows = {
                item.slot: (r, item.start, i) for i, (item, r) in enumerate(zip(items, requests, strict=True))
            }

    def _goes_on(self, request: Request) -> bool:
        """Whether the request's next pass is a decode pass, unless the token that was just sampled ends it."""
        params, generated = request.params, len(request.output_ids) + 1
        if request.state is not State.DECODE or request.slot is None or generated == params.max_tokens:
            return False
        if request.constraint is not None:
            return False  # may end it, and what it allows next is found out meanwhile
        may_stop = not params.ignore_eos or params.stop_token_ids
        if request.bound_slot is not None and self._has_state and may_stop:
            return False  # the slot lives on, and to take recurrent state back is to compute it anew
        end = request.num_tokens + 1
        return end <= self._slots.max_context and self._slots.pages.extend(request.slot, end)

    def take(self, item: SlotTokens, request: Request) -> PassResult | None:
        """The result of this item of a decode pass, if it has been launched; once."""
        launched, position, row = self._rows.get(item.slot, (None, 0, 0))
        if self._logits is None or launched is not request or position != item.start:
            return None
        del self._rows[item.slot]
        return PassResult(self._logits[row])

    def drop(self, request: Request) -> bool:
        """The request ends now: its row is not needed. Whether its slot lives on with a state that is a token too far."""
        slot = request.slot
        if slot is None or self._rows.get(slot, (None,))[0] is not request:
            return False
        del self._rows[slot]
        return request.bound_slot is not None and self._has_state

    def forget(self) -> None:
        self._logits, self._rows = None, {}
