"""Where the time of a step goes on a GPU: the kernels it ran, as torch's profiler saw them, by family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from pocketllm.kernels.protocol import Kernels

KernelRun = tuple[str, float, float]  # name, start and duration in microseconds of the device's clock

# Names of the Triton kernels, prefill's among them.
FAMILIES = {
    "bridge": ("bridge_kernel",),
    "products": (
        "product_kernel", "sum_splits_kernel", "fp8_product_kernel", "quantize_kernel", "silu_mul_kernel",
        "expert_kernel", "combine_kernel",
    ),
    "delta rule": (
        "conv_step_kernel", "delta_step_kernel", "hopper_step_kernel", "gated_norm_kernel", "commit_kernel", "conv_kernel",
        "chunk_kernel", "scan_kernel",
    ),
    "attention": (
        "split_kernel", "hopper_split_kernel", "hopper_plain_split_kernel", "merge_kernel", "hopper_merge_kernel",
        "query_pairs_kernel", "rotate_kernel", "append_kernel", "norm_rope_kernel", "sigmoid_mul_kernel", "pairs_kernel",
        "prefill_kernel", "gather_kernel", "join_kernel", "dequantize_kernel",
    ),
    "norms": ("rms_norm_kernel", "add_norm_kernel", "add_up_kernel"),
    "ranks": (),
    "rest": ("embedding_kernel",),
}  # fmt: skip
# What names of other kernels contain, in lower case; the first that fits.
_LIBRARIES = {"nccl": "ranks"} | dict.fromkeys(("gemm", "gemv", "nvjet", "cutlass", "cublas", "sm90_"), "products")


@cache
def family_of(name: str) -> str:
    """The family of a kernel of this name; rest for what belongs to none (sampling, copies)."""
    for family, names in FAMILIES.items():
        if name in names:
            return family
    return next((family for part, family in _LIBRARIES.items() if part in name.lower()), "rest")


def family_us(runs: Sequence[KernelRun]) -> dict[str, float]:
    """Microseconds by family, in the order of FAMILIES; together the time in which at least one of the kernels ran.

    Where several run, the time goes to the one that started first (of those that started at once, to the one that ends
    first): a kernel launched early, which waits for the one before, is given none of that wait.
    """
    found = dict.fromkeys(FAMILIES, 0.0)
    given = float("-inf")  # until then, time has been given to kernels that started earlier
    for name, start, duration in sorted(runs, key=lambda run: (run[1], run[2], run[0])):
        begin, end = max(start, given), start + duration
        if end > begin:
            found[family_of(name)] += end - begin
            given = end
    return found


def families_ms(runs: Sequence[KernelRun], steps: int) -> dict[str, float] | None:
    """`family_us` in milliseconds a step, of the runs of so many; None if no kernel was recorded."""
    return {family: round(us / 1e3 / steps, 4) for family, us in family_us(runs).items()} if runs else None


def can_record(kernels: Kernels, device: torch.device) -> bool:
    """Whether there are kernels of these families for the profiler to see."""
    if device.type != "cuda" or kernels.name != "triton":
        return False
    return ProfilerActivity.CUDA in supported_activities()


def record_kernels(step: Callable[[], object], steps: int, device: torch.device) -> list[KernelRun]:
    """What `device` ran, copies and fills included, in so many calls of `step`, without what was under way before."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(device)
    return [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation  # calls of the host are listed too
    ]
