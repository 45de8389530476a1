"""`TokenConstraint`: which tokens a request may choose next.

The engine knows token ids only. What stands behind a constraint (a grammar, a limit on reasoning) is the text layer's
business: see `text/grammar.py` and `text/thinking.py`. A constraint belongs to one request and is used up by it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TokenConstraint(Protocol):
    """Asked once before each token of its request, told each token that was chosen. Whatever it raises fails that request
    only. A request that ends by itself (end of sequence, a stop token) does not tell its last token.
    """

    def allowed(self) -> Tensor | None:
        """The tokens that may come next: int32 [words] on the CPU, bit `t % 32` of word `t // 32` is token t.

        Tokens beyond the last word are forbidden; None allows every token. The tensor is read before the next call.
        A complete answer must allow the end-of-sequence tokens, or be `finished`.
        """

    def accept(self, token_id: int) -> None:
        """`token_id` was chosen. RequestError if it can't follow."""

    @property
    def finished(self) -> bool:
        """The answer is complete and nothing may follow it: the engine ends the request with "stop", needing no
        end-of-sequence token (so this also holds with `ignore_eos`)."""
