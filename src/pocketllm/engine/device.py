"""The device an engine runs on: which one, and how much memory is free."""

from __future__ import annotations

from pathlib import Path

import torch

from pocketllm.errors import OptionError

CPU_SHARE = 0.8  # of what the machine has available: the rest stays for the caller and the file cache
GPU_SHARE = 0.95


def pick_device(name: str) -> torch.device:
    """auto is the first GPU if there is one; OptionError if a GPU is asked for that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"device = {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def available_memory(device: torch.device) -> int | None:
    """Bytes an engine may plan with; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * CPU_SHARE)
    return None
