"""The time of a GPU's kernels by family, of made-up recordings; and that recording is off the clock of `pocketllm bench`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import pocketllm.kernels
from pocketllm.cli import bench_run
from pocketllm.cli.bench_families import FAMILIES, can_record, families_ms, family_of, family_us
from pocketllm.cli.bench_run import context_needed, random_tokens, timed_decode
from pocketllm.cli.main import app
from pocketllm.engine.engine import Engine
from tiny_models import make

NAMES = ("bridge_kernel", "product_kernel", "delta_step_kernel", "split_kernel", "rms_norm_kernel", "Memcpy DtoH")
# Whole microseconds, whose sums are exact.
RUNS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 60).map(float), st.integers(0, 20).map(float)), max_size=12
)


def spent(*runs):
    return {family: us for family, us in family_us(runs).items() if us}


@given(RUNS)
@example([("bridge_kernel", 0.0, 9.0), ("product_kernel", 0.0, 9.0)])
def test_each_microsecond_goes_to_the_oldest_kernel_that_runs(runs):
    by_hand = dict.fromkeys(FAMILIES, 0.0)
    for now in range(80):
        running = [(start, length, name) for name, start, length in runs if start <= now < start + length]
        if running:
            by_hand[family_of(min(running)[2])] += 1
    assert family_us(runs) == by_hand
    busy = {now for _, start, length in runs for now in range(int(start), int(start + length))}
    assert sum(family_us(runs).values()) == len(busy)


@given(RUNS, st.randoms())
def test_the_order_of_the_recording_does_not_matter(runs, random):
    shuffled = random.sample(runs, len(runs))
    assert family_us(shuffled) == family_us(runs)


@given(RUNS)
def test_kernels_one_after_the_other_have_their_durations(runs):
    now, queue, durations = 0.0, [], dict.fromkeys(FAMILIES, 0.0)
    for name, gap, length in runs:
        queue.append((name, now + gap, length))
        durations[family_of(name)] += length
        now += gap + length
    assert family_us(queue) == durations


def test_overlaps():
    bridge, product = ("bridge_kernel", 10.0, 20.0), ("product_kernel", 15.0, 5.0)
    assert spent() == {}
    assert spent(bridge) == {"bridge": 20.0}
    assert spent(bridge, product) == {"bridge": 20.0}  # all of it inside
    assert spent(bridge, ("product_kernel", 25.0, 10.0)) == {"bridge": 20.0, "products": 5.0}  # launched early
    assert spent(bridge, product, ("split_kernel", 18.0, 14.0)) == {"bridge": 20.0, "attention": 2.0}
    assert spent(bridge, ("split_kernel", 40.0, 1.0)) == {"bridge": 20.0, "attention": 1.0}  # idle in between


def test_milliseconds_of_a_step():
    runs = [("bridge_kernel", 0.0, 3000.0), ("add_norm_kernel", 2000.0, 2000.0)]
    assert families_ms(runs, 2) == dict.fromkeys(FAMILIES, 0.0) | {"bridge": 1.5, "norms": 0.5}
    assert families_ms([], 4) is None


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("merge_kernel", "attention"),
        ("sum_splits_kernel", "products"),
        ("nvjet_qqtst_128x8_64x12_2x1_v_bz_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(Params)", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(Params)", "products"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ranks"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, ArgMaxOps<float>>>(R)", "rest"),
        ("Memcpy DtoH (Device -> Pinned)", "rest"),
        ("embedding_kernel", "rest"),
    ],
)
def test_family_of_a_name(name, family):
    assert family_of(name) == family


def test_every_kernel_of_the_backend_has_one_family_and_its_own_name():
    folder = Path(pocketllm.kernels.__file__).parent / "triton"
    defined = [
        name for file in folder.glob("*.py") for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)
    ]
    assert len(defined) > 20
    assert sorted(defined) == sorted(name for names in FAMILIES.values() for name in names)


def test_only_triton_kernels_on_a_gpu_can_be_recorded(monkeypatch):
    monkeypatch.setattr(
        "pocketllm.cli.bench_families.supported_activities", lambda: {torch.profiler.ProfilerActivity.CUDA}
    )
    triton, reference = SimpleNamespace(name="triton"), SimpleNamespace(name="reference")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert can_record(triton, gpu)
    assert not can_record(triton, cpu)
    assert not can_record(reference, gpu)
    monkeypatch.setattr("pocketllm.cli.bench_families.supported_activities", set)
    assert not can_record(triton, gpu)


# -- in `pocketllm bench` ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make("qwen3", tmp_path_factory.mktemp("model"))[0]


@pytest.fixture
def recordings(monkeypatch):
    """The steps that were asked for under the profiler, of a device that takes 2 ms for each."""
    asked = []

    def record(step, steps, device):
        asked.append((steps, device.type))
        return [(name, 2e3 * i, 2e3) for i in range(steps) if step() > 0 for name in ("split_kernel",)]

    monkeypatch.setattr(bench_run, "record_kernels", record)
    return asked


def bench(model, *args):
    arguments = ["bench", str(model), "--threads", "1", "--steps", "2", "--prompt", "20", "--context", "30", *args]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_recorded_steps_are_not_on_the_clock(model, recordings):
    engine = Engine(model, max_batch_size=2, max_context=context_needed(30, 3, 4), threads=1, kernels="reference")
    prompts = [random_tokens(engine, 31, slot) for slot in range(2)]
    plain = timed_decode(engine, prompts, 3, "prefill")
    assert (recordings, plain.kernels) == ([], [])
    decode = timed_decode(engine, prompts, 3, "prefill", 4)
    assert recordings == [(4, "cpu")]
    assert (len(decode.step_seconds), decode.context, len(decode.kernels)) == (3, plain.context, 4)
    assert [len(tokens) for tokens in decode.tokens] == [len(tokens) + 4 for tokens in plain.tokens]
    assert not engine.has_work


def test_bench_shows_what_was_recorded(model, recordings, monkeypatch):
    monkeypatch.setattr(bench_run, "can_record", lambda kernels, device: True)
    values = json.loads(bench(model, "--slots", "1", "--json"))
    assert (
        values["families_ms"] == values["rows"][0]["families_ms"] == dict.fromkeys(FAMILIES, 0.0) | {"attention": 2.0}
    )
    lines = bench(model, "--slots", "1,2").splitlines()
    title = next(i for i, line in enumerate(lines) if "by kernel family" in line)
    assert lines[title + 1].split() == ["slots", "context", "kv", "attention", "all"]
    assert [line.split() for line in lines[title + 2 :]] == [[n, "30", "fp32", "2.000", "2.000"] for n in "12"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is shown without a GPU")
def test_a_cpu_records_nothing(model, recordings):
    assert json.loads(bench(model, "--slots", "1", "--json"))["families_ms"] is None
    assert "by kernel family" not in bench(model)
    assert recordings == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_records_its_kernels(model):
    values = json.loads(bench(model, "--slots", "1", "--json"))
    families = values["families_ms"]
    assert min(families["products"], families["attention"], families["norms"]) > 0
    assert families["ranks"] == 0
