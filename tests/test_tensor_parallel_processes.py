"""Tensor parallelism with real processes over gloo: same tokens, and every way to end leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from engines import CPU_BACKENDS, drain, prompt, tokens_of
from pocketllm import Engine, EngineOptions, SamplingParams
from pocketllm.engine.ranks import ProcessRanks, ProcessWorker
from pocketllm.errors import ModelError, RankError
from pocketllm.models.registry import read_model

SIZES: dict[str, Any] = {"max_batch_size": 4, "max_context": 256, "page_size": 16, "threads": 2}  # one for each rank
ALONE = {**SIZES, "threads": 1}
PATIENCE = 60.0  # seconds: what is waited for takes well under one on an idle machine


def ranks_of(engine: Engine) -> ProcessRanks:
    assert isinstance(engine._ranks, ProcessRanks)
    return engine._ranks


def pids_of(engine: Engine) -> list[int]:
    return [process.pid for process in processes_of(ranks_of(engine))]


def processes_of(ranks: ProcessRanks) -> list[subprocess.Popen[bytes]]:
    return [worker.process for worker in ranks._workers if isinstance(worker, ProcessWorker)]


def start(folder: Path, *command: object) -> subprocess.Popen[str]:
    """A Python process whose temporary files are in `folder`: one that is killed leaves them."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_running(pid: int) -> bool:
    """Whether the process computes: one that ended and waits to be reaped by somebody does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def check_nothing_left(ranks: ProcessRanks) -> None:
    for process in processes_of(ranks):
        assert process.returncode is not None
        assert not is_running(process.pid)
    assert not ranks._folder.exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.make("qwen3_5", tmp_path)[0]


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """Engines a test makes, closed at its end even if it fails."""
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def tokens(engine: Engine) -> list[list[int]]:
    names = [engine.add_request(prompt(n, n), SamplingParams(max_tokens=12, ignore_eos=True)) for n in (5, 40, 130)]
    outputs = drain(engine)
    return [tokens_of(outputs[name]) for name in names]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_two_processes_equal_one_and_end_in_order(backend: str, model: Path, engines: list[Engine]) -> None:
    """Decode passes of the CPU backend are recorded and replayed, sums over the ranks included."""
    one = Engine(model, kernels=backend, **ALONE)
    two = Engine(model, kernels=backend, tensor_parallel=2, **SIZES)
    engines.append(two)
    want = tokens(one)
    assert tokens(two) == want
    two.looks_ahead = True
    assert tokens(two) == want
    ranks = ranks_of(two)
    recordings = two.runner.local._graphs._graphs
    assert bool(recordings) == (backend == "numba")
    two.close()
    assert not recordings  # NCCL would wait for those that hold its collectives
    check_nothing_left(ranks)
    assert [process.returncode for process in processes_of(ranks)] == [0]
    two.close()
    with pytest.raises(RankError, match="closed"):
        tokens(two)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("qwen3", tmp_path_factory.mktemp("wide"))[0]


@pytest.fixture(scope="module")
def four(wide: Path) -> Iterator[Engine]:
    """Four ranks. The second test of those that use it kills one."""
    engine = Engine(wide, kernels="reference", tensor_parallel=4, **SIZES)
    yield engine
    engine.close()


def test_four_processes_beside_another_engine(four: Engine, wide: Path, model: Path, engines: list[Engine]) -> None:
    """Sums over four ranks are taken in rank order, so that batches do not change a slot's logits. Engines do not meet."""
    other = Engine(model, kernels="reference", tensor_parallel=2, **SIZES)
    engines.append(other)
    want = tokens(Engine(wide, kernels="reference", **ALONE))
    assert tokens(four) == want
    assert len(tokens(other)) == 3
    alone = four.add_request(prompt(40, 40), SamplingParams(max_tokens=12, ignore_eos=True))
    assert tokens_of(drain(four)[alone]) == want[1]


def test_a_killed_rank_takes_the_engine_down(four: Engine) -> None:
    """The other workers end too, and each later call says what happened."""
    four.add_request(prompt(40), SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(3):
        four.step()
    os.kill(pids_of(four)[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 2 was killed by SIGKILL.*build a new one"):
        drain(four)
    with pytest.raises(RankError, match="rank 2 was killed by SIGKILL"):
        four.step()
    assert eventually(lambda: not any(is_running(pid) for pid in pids_of(four)))
    check_nothing_left(ranks_of(four))


def test_a_rank_killed_while_nothing_runs(model: Path, engines: list[Engine]) -> None:
    engine = Engine(model, kernels="reference", tensor_parallel=2, **SIZES)
    engines.append(engine)
    os.kill(pids_of(engine)[0], signal.SIGTERM)
    assert eventually(lambda: engine.failure is not None)
    with pytest.raises(RankError, match="rank 1 was killed by SIGTERM"):
        tokens(engine)


def test_an_error_of_a_rank_at_the_start_is_the_callers(model: Path, tmp_path: Path) -> None:
    checkpoint = read_model(model)
    shutil.rmtree(model)  # rank 0 has its files open
    seen: list[ProcessRanks] = []

    def launch(*arguments: Any) -> ProcessRanks:
        seen.append(ProcessRanks(*arguments))
        return seen[0]

    with pytest.raises(ModelError, match="rank 1: "):
        Engine(checkpoint, EngineOptions(tensor_parallel=2, kernels="reference", **SIZES), launch=launch)
    check_nothing_left(seen[0])


PROGRAM = """
import sys
from pocketllm import Engine, SamplingParams

sizes = {"max_batch_size": 1, "max_context": 4096, "kernels": "reference", "threads": 1}
engine = Engine(sys.argv[1], tensor_parallel=2, **sizes)
print(*(worker.process.pid for worker in engine._ranks._workers if hasattr(worker, "process")), flush=True)
engine.add_request([1, 2, 3], SamplingParams(max_tokens=int(sys.argv[2]), ignore_eos=True))
while engine.has_work:
    for output in engine.step():
        print(*output.new_token_ids)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A script without `if __name__ == "__main__"`."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_rank_0(end: signal.Signals, program: Path, wide: Path) -> None:
    """Killed, or interrupted (ctrl-C) in the midst of passes."""
    process = start(program.parent, program, wide, 4000)
    assert process.stdout is not None
    (pid,) = map(int, process.stdout.readline().split())
    assert is_running(pid)
    time.sleep(0.2)  # some passes
    process.send_signal(end)
    _, news = process.communicate(timeout=PATIENCE)
    assert process.returncode == -end
    assert eventually(lambda: not is_running(pid))
    if end == signal.SIGINT:
        assert "KeyboardInterrupt" in news
        assert "RankError" not in news


def test_under_torchrun_its_processes_are_the_ranks(program: Path, wide: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", 2)
    output, news = start(program.parent, *torchrun, program, wide, 5).communicate(timeout=3 * PATIENCE)
    one = Engine(wide, kernels="reference", **ALONE)
    name = one.add_request([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    assert list(map(int, output.split())) == tokens_of(drain(one)[name]), news
