"""Kernel backends: the same functions in each (`protocol.Kernels`). Chosen once, then passed to every constructor."""

from __future__ import annotations

import importlib
from typing import cast

from pocketllm.errors import OptionError
from pocketllm.kernels.protocol import Kernels

BACKENDS = ("reference",)


def select_kernels(name: str, device_type: str) -> Kernels:
    """The backend called `name` for a device type ("cpu", "cuda"); "auto" takes the fastest there is for it."""
    chosen = "reference" if name == "auto" else name
    if chosen not in BACKENDS:
        raise OptionError(f"kernels = {name!r}: choose one of auto, {', '.join(BACKENDS)}")
    return cast(Kernels, importlib.import_module(f"{__name__}.{chosen}"))
