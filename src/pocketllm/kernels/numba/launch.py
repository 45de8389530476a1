"""`launch` and `capture`: a pass's kernels as a list that can be run again.

Between two kernels of a decode pass stands Python code that only computes addresses: views, new tensors, arguments. It
costs about as much as the kernels of a small model, and comes to the same result each time. So a pass is recorded once:
every kernel with its arguments, every tensor made (kept, so that addresses stay valid), and the few operations left to
torch, which are done again and copied to where their result stood. A replay is a loop over that list: the CPU's counterpart
of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_recordings: list[_Recording] = []  # none or one; the engine's thread records while it runs a pass


def launch(kernel: Any, *arguments: Any) -> None:
    """Runs a kernel that writes to memory given by its arguments. All calls of kernels go through here."""
    kernel(*arguments)
    if _recordings:
        _recordings[0].steps.append((kernel, arguments))


def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """As `Kernels.capture`. Not repeatable is a pass with an operation whose result's *shape* depends on values."""
    recording = _Recording()
    _recordings.append(recording)
    try:
        with recording:
            result = run()
    finally:
        _recordings.pop()
    if not recording.repeatable:
        return result, None
    steps, made = recording.steps, recording.made

    def replay() -> Tensor:
        for function, arguments in steps:
            function(*arguments)
        return result

    replay.memory = made  # type: ignore[attr-defined]  # lives as long as the addresses are used
    return result, replay


class _Recording(TorchDispatchMode):
    """Sees every torch operation while it is active."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper that keeps torch's compiler away from the method below: it imports it, which takes over a second."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.steps: list[tuple[Any, tuple[Any, ...]]] = []
        self.made: list[Any] = []
        self.repeatable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.made.append(result)
        if _depends_on_values(func, args):
            self.repeatable = False
        elif func._schema.is_mutable:
            self.steps.append((_again, (func, args, kwargs)))
        elif not _computes_nothing(func, args, result):
            self.steps.append((_again_into, (result, func, args, kwargs)))
        return result


def _depends_on_values(func: Any, args: Any) -> bool:
    """Whether the result's shape, or what Python code makes of it, depends on values."""
    if (
        func.overloadpacket is torch.ops.aten.index
    ):  # tagged for its masks; whole numbers give as many rows as there are
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _computes_nothing(func: Any, args: Any, result: Any) -> bool:
    """Views, and tensors whose contents come from a kernel. (`reshape` and `to` are views only where they can be.)"""
    if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like):
        return True
    first = result if isinstance(result, Tensor) else result[0]
    storage = first.untyped_storage().data_ptr()
    return any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == storage for x in args)


def _again(func: Any, args: Any, kwargs: Any) -> None:
    func(*args, **kwargs)


def _again_into(result: Any, func: Any, args: Any, kwargs: Any) -> None:
    again = func(*args, **kwargs)
    if isinstance(result, Tensor):
        result.copy_(again)
        return
    for old, new in zip(result, again, strict=True):
        old.copy_(new)
