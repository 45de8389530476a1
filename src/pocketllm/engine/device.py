"""The device an engine runs on: which one, and how much memory is free."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch

from pocketllm.errors import OptionError
from pocketllm.options import own_allocator_settings

_library: Any = torch._C
CPU_SHARE = 0.8  # of what the machine has available: the rest stays for the caller and the file cache
GPU_SHARE = 0.95
# Bytes; an H200 rounds them up to 11.25 MiB, which is what its driver (CUDA 13) begins with. Partial sums of attention over
# 8 slots x 32,768 tokens of quantised KV take 4 MiB, and four times that when 4 tokens of each are verified. More is no
# better: with 18.75 MiB a copy takes a sixth longer, and so does a step of Gated DeltaNet's states.
SET_ASIDE = 8 * 2**20
_PERSISTING_L2 = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE


def pick_device(name: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """auto is the first GPU if there is one; OptionError if a GPU is asked for that is not there.

    Each rank has a GPU of its own: the named one and those that follow it. On a CPU, ranks share the machine.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    first, there = device.index or 0, torch.cuda.device_count()
    if first + num_ranks > there:
        wanted = f" with tensor_parallel = {num_ranks} needs {num_ranks} GPUs" if num_ranks > 1 else ""
        raise OptionError(f"device = {name!r}{wanted}: this machine has {there} CUDA devices")
    return torch.device("cuda", first + rank)


def of_one_kind(device: torch.device, rank: int, num_ranks: int) -> bool:
    """Whether the GPUs of all ranks are the same model, of which `device` is that of `rank` (see `pick_device`)."""
    first = (device.index or 0) - rank
    found = [torch.cuda.get_device_properties(i) for i in range(first, first + num_ranks)]
    return len({(gpu.name, gpu.multi_processor_count) for gpu in found}) == 1


def available_memory(device: torch.device, num_ranks: int = 1) -> int | None:
    """Bytes a rank may plan with; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * CPU_SHARE / num_ranks)
    return None


def used_memory(device: torch.device) -> int | None:
    """Bytes in use now: of a GPU, by this process's tensors; of a CPU, by the whole process (its resident set). None where
    the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def forget_peak(device: torch.device) -> None:
    """From now on `peak_memory` counts anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """As `used_memory`; of a GPU, the most that was in use at a time since `forget_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else used_memory(device)


def allocate_exactly(device: torch.device) -> None:
    """From now on torch's allocator gives a GPU's tensors what they take, as plans count it, and not whole segments of 2 or
    20 MiB each. Settings of the user's own stay as they are."""
    if device.type == "cuda" and not own_allocator_settings():
        _library._accelerator_setAllocatorSettings("expandable_segments:True")


def set_cache_aside(device: torch.device, nbytes: int = SET_ASIDE) -> None:
    """From now on a Hopper GPU keeps part of its L2 for what kernels store to be read again soon ("evict last"). Else much
    of it is pushed out into memory before it is read, by K and V, which are read once.

    A setting of this process's CUDA context, which stays after the engine and holds for all that runs in it: other kernels
    have that much less of the L2 for what they read twice. A larger one, made before, stays as it is (drivers begin with
    some of their own), and a GPU that has none (in MIG mode) does without.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # now there is a context
        driver, now = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
        if driver.cuCtxGetLimit(ctypes.byref(now), _PERSISTING_L2) == 0 and now.value < nbytes:
            driver.cuCtxSetLimit(_PERSISTING_L2, ctypes.c_size_t(nbytes))


def limit_memory(device: torch.device, nbytes: int | None) -> None:
    """From now on this process's tensors take at most `nbytes` of a GPU: more is refused as if the GPU had no more."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = 1.0 if nbytes is None else min(max(nbytes / total, 0.0), 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, device)
