"""Triton's interpreter (TRITON_INTERPRET=1, for tests on a CPU) and NumPy since 2.4.

Triton 3.6 keeps scalars as arrays of one element and turns them into loop bounds with int(), which NumPy no longer allows.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def patch() -> None:
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
