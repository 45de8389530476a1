"""The package's own structure: imports go one way, and a file holds one idea."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pocketllm

ROOT = Path(__file__).parents[1]
FILES = sorted(Path(pocketllm.__file__).parent.rglob("*.py"))


def test_imports_go_one_way() -> None:
    command = "import sys; from importlinter.cli import lint_imports_command as run; sys.argv = ['lint-imports']; run()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "1 kept, 0 broken" in result.stdout, result.stdout + result.stderr


def test_files_stay_readable() -> None:
    long = {file.name: count for file in FILES if (count := len(file.read_text().splitlines())) > 410}
    assert not long


def test_only_the_options_read_the_environment() -> None:
    """Settings come in as arguments, so two engines in one process can differ."""
    readers = [f.name for f in FILES if re.search(r"os\.environ|os\.getenv", f.read_text())]
    assert readers == ["options.py"]


def test_no_layer_or_kernel_has_a_current_slot() -> None:
    for file in FILES:
        if file.parts[-2] in ("layers", "cache", "reference", "numba", "triton"):
            assert not re.search(r"current_slot|self\.slot\b|self\._slot\b", file.read_text()), file.name
