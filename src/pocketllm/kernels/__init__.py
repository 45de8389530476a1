"""Kernel backends: the same functions in each (`protocol.Kernels`). Chosen once, then passed to every constructor."""

from __future__ import annotations

import importlib
import importlib.util
from typing import cast

from pocketllm.errors import OptionError
from pocketllm.kernels.protocol import Kernels

BACKENDS = ("reference", "numba", "triton")


def select_kernels(name: str, device_type: str) -> Kernels:
    """The backend called `name` for a device type ("cpu", "cuda"); "auto" takes the fastest there is for it."""
    has_numba = importlib.util.find_spec("numba") is not None
    has_triton = importlib.util.find_spec("triton") is not None
    chosen = name
    if name == "auto":
        fastest, installed = ("numba", has_numba) if device_type == "cpu" else ("triton", has_triton)
        chosen = fastest if installed else "reference"
    if chosen not in BACKENDS:
        raise OptionError(f"kernels = {name!r}: choose one of auto, {', '.join(BACKENDS)}")
    if chosen == "numba" and device_type != "cpu":
        raise OptionError(f"kernels = 'numba' runs on a CPU: use kernels='auto' on {device_type}, or device='cpu'")
    if chosen == "numba" and not has_numba:
        raise OptionError("kernels = 'numba' needs the package numba: pip install 'pocketllm[cpu]'")
    if chosen == "triton" and not has_triton:
        raise OptionError("kernels = 'triton' needs the package triton: pip install 'pocketllm[gpu]'")
    if chosen == "triton" and device_type == "cpu":
        from pocketllm.kernels.triton.numerics import INTERPRETED

        if not INTERPRETED:
            raise OptionError("kernels = 'triton' needs a GPU: use kernels='auto' (or TRITON_INTERPRET=1, to test)")
    return cast(Kernels, importlib.import_module(f"{__name__}.{chosen}"))
