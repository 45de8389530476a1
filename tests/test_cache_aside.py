"""The part of a Hopper GPU's L2 that is kept for what kernels read again soon, with a driver that stands in for CUDA's."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pocketllm.engine import device as devices

GPU = torch.device("cuda", 0)


class Driver:
    """CUDA's, as far as limits go. `now` is the limit in bytes; a driver that refuses has none to give."""

    def __init__(self, now: int = 0, refuses: bool = False) -> None:
        self.now, self.refuses, self.asked = now, refuses, 0

    def cuCtxGetLimit(self, value: Any, limit: int) -> int:
        assert limit == 6
        ctypes.cast(value, ctypes.POINTER(ctypes.c_size_t))[0] = self.now
        return 801 if self.refuses else 0

    def cuCtxSetLimit(self, limit: int, nbytes: ctypes.c_size_t) -> int:
        assert limit == 6
        self.now, self.asked = nbytes.value, self.asked + 1
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 1))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return driver


@pytest.mark.parametrize("before", [0, 2**20])
def test_a_hopper_gpu_keeps_a_part(driver: Driver, before: int) -> None:
    driver.now = before
    devices.set_cache_aside(GPU)
    assert driver.now == devices.SET_ASIDE


@pytest.mark.parametrize(("now", "refuses"), [(2**25, False), (0, True)], ids=["more", "none to be had"])
def test_what_is_there_stays(driver: Driver, now: int, refuses: bool) -> None:
    driver.now, driver.refuses = now, refuses
    devices.set_cache_aside(GPU)
    assert (driver.now, driver.asked) == (now, 0)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_the_driver_has_it() -> None:
    devices.set_cache_aside(GPU)
    now = ctypes.c_size_t()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetLimit(ctypes.byref(now), 6) == 0
    assert now.value >= devices.SET_ASIDE  # in whole steps of the hardware's


def test_other_devices_are_left_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.set_cache_aside(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    devices.set_cache_aside(GPU)
    assert driver.asked == 0
