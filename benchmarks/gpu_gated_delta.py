"""Times the Gated DeltaNet kernels of one layer of Qwen3.5-27B on a GPU, with several ways to share out the work.

    python benchmarks/gpu_gated_delta.py             steps: checks them, then times those that are right
    python benchmarks/gpu_gated_delta.py --prefill   checks prefill against the reference, then times it by kernel

`floor` is the time in which a device-to-device copy moves what a kernel must read and write. A line of the prefill's table
is one run with these sizes: each kernel's figure depends on its own sizes only. A line of the steps' table: us of decode
with 16-bit outputs, of decode with pairs for a bridge, of verify with 4 tokens a slot, each at the numbers of slots above.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpu_attention import copy_bandwidth
from pocketllm.kernels import triton as kernels
from pocketllm.kernels.reference import gated_delta as reference
from pocketllm.kernels.triton import gated_delta
from pocketllm.kernels.triton.delta_hopper import HopperStep
from pocketllm.kernels.triton.gated_delta import ChunkConfig, ConvConfig, StateConfig
from pocketllm.kernels.triton.tune import time_graph
from pocketllm.kernels.types import Bridge, GatedDeltaWeights, LayerState, LinearWeight, Readers
from pocketllm.weights.formats import FORMATS

DEVICE = torch.device("cuda", 0)
KEY_HEADS, HEADS, DIM, TAPS = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
SLOTS = 64
DECODED, VERIFIED = (1, 2, 4, 8, 32, 64), (1, 8, 32)  # slots
DRAFTS = 4  # tokens a slot
PATIENCE = 30.0  # seconds that checks may take: none may wait for ever
KERNELS = ("conv_kernel", "chunk_kernel", "scan_kernel", "gated_norm_kernel")
Variant = tuple[ConvConfig, ChunkConfig, StateConfig]
CONVS = [ConvConfig(8, 8, 4), ConvConfig(16, 8, 8), ConvConfig(8, 4, 4), ConvConfig(4, 8, 2), ConvConfig(16, 4, 8)]
SOLVES = [ChunkConfig(4, 4), ChunkConfig(16, 4), ChunkConfig(8, 8), ChunkConfig(8, 4), ChunkConfig(16, 8)]
SCANS = [
    StateConfig(64, 4, 3), StateConfig(128, 8, 3), StateConfig(64, 4, 2), StateConfig(64, 4, 1), StateConfig(64, 8, 3),
    StateConfig(128, 8, 2), StateConfig(128, 8, 1), StateConfig(64, 8, 2),
]  # fmt: skip
Step = HopperStep | tuple[int, int | None]  # `gated_delta.HOPPER_STEP`, or where that is None, `gated_delta.STEP`
STEPS: list[Step] = [
    (4, None), (8, 128), HopperStep(4, 3, 2, 96), HopperStep(4, 3, 1, 104), HopperStep(4, 2, 2, 96),
    HopperStep(8, 3, 1, 96),
]  # fmt: skip
REPEATS = 5  # of a variant; the first is not counted


def weights() -> GatedDeltaWeights:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE)

    return GatedDeltaWeights(
        random(CHANNELS, TAPS) / 2, random(HEADS), random(HEADS), random(DIM), 1e-6, KEY_HEADS, HEADS, DIM, DIM
    )


def state(journal: int = 0) -> LayerState:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(SLOTS + 1, *shape, device=DEVICE)

    return LayerState(
        zeros(CHANNELS, TAPS - 1).bfloat16(), zeros(HEADS, DIM, DIM), zeros(journal, CHANNELS).bfloat16(),
        zeros(journal, KEY_HEADS, DIM), zeros(journal, HEADS, DIM), zeros(journal, HEADS),
    )  # fmt: skip


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    qkvz = torch.randn(tokens, CHANNELS + HEADS * DIM, device=DEVICE).bfloat16()
    ba = torch.randn(tokens, 2 * HEADS, device=DEVICE).bfloat16()
    return qkvz[:, :CHANNELS], qkvz[:, CHANNELS:], ba[:, :HEADS], ba[:, HEADS:]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def batch(lengths: list[int], starts: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """slot_ids, cu_seqlens_q and kv_lens of sequences that go on at `starts`."""
    ends = [start + length for start, length in zip(starts or [0] * len(lengths), lengths, strict=True)]
    return ints(*range(len(lengths))), ints(0, *accumulate(lengths)), ints(*ends)


def step_inputs(tokens: int, pairs: bool) -> tuple[Any, ...]:
    x = inputs(tokens)
    if pairs:  # as the kernel before then leaves them: gates in two summands
        return (*x[:2], *torch.randn(2, tokens, 2 * HEADS, device=DEVICE).split(HEADS, dim=2))
    return x


def decode_calls(x: tuple[Tensor, ...], w: GatedDeltaWeights, states: list[LayerState], readers: Readers) -> list[Any]:
    """Steps of other slots each time, so that no state is in L2 when it is read: all slots of each layer's states."""
    slot_ids = torch.arange(SLOTS, dtype=torch.int32, device=DEVICE).view(-1, len(x[0]))
    return [partial(kernels.gated_delta_decode, *x, w, s, ids, readers=readers) for s in states for ids in slot_ids]


def verify_calls(x: tuple[Tensor, ...], w: GatedDeltaWeights, states: list[LayerState]) -> list[Any]:
    slot_ids = torch.arange(SLOTS, dtype=torch.int32, device=DEVICE).view(-1, len(x[0]) // DRAFTS)
    return [partial(kernels.gated_delta_verify, *x, w, s, ids, DRAFTS) for s in states for ids in slot_ids]


def timed_calls(w: GatedDeltaWeights, states: list[LayerState]) -> list[list[list[Any]]]:
    """Calls of each figure of each third of a line of the table: so many that a graph's own start does not count."""
    thirds = [
        [decode_calls(step_inputs(n, False), w, states, ()) for n in DECODED],
        [decode_calls(step_inputs(n, True), w, states, any_bridge()) for n in DECODED],
        [verify_calls(inputs(n * DRAFTS), w, states) for n in VERIFIED],
    ]
    return [[calls * max(24 // len(calls), 1) for calls in third] for third in thirds]


def use_step(step: Step) -> None:
    if isinstance(step, HopperStep):
        gated_delta.HOPPER_STEP = step
    else:
        gated_delta.HOPPER_STEP, gated_delta.STEP = None, step


def check_step(step: Step) -> None:
    """In a process of its own. Also compiles what is timed."""
    w = weights()
    use_step(step)
    wrong = check_steps(w) + check_many(w, step)
    for what in wrong:
        print(f"WRONG with {step}: {what}", flush=True)
    for part in timed_calls(w, [state(journal=DRAFTS)]):
        for calls in part:
            calls[0]()
    torch.cuda.synchronize()
    sys.exit(bool(wrong))


def right_steps() -> list[Step]:
    """All are checked at the same time; one that hangs does not keep the others from being timed."""
    end, right = time.perf_counter() + PATIENCE, []
    running = [multiprocessing.get_context("spawn").Process(target=check_step, args=(step,)) for step in STEPS]
    for process in running:
        process.start()
    for step, process in zip(STEPS, running, strict=True):
        process.join(max(end - time.perf_counter(), 0.1))
        if process.exitcode == 0:
            right.append(step)
        else:
            print(f"NOT TIMED, as it {'hangs' if process.is_alive() else 'is wrong'}: {step}", flush=True)
            process.kill()
    return right


def steps() -> None:
    begin, chosen = time.perf_counter(), right_steps()
    print(f"-- checked in {time.perf_counter() - begin:.0f} s: {len(chosen)} of {len(STEPS)} are right", flush=True)
    w, bandwidth = weights(), copy_bandwidth()
    states = [state(journal=DRAFTS) for _ in range(2)]  # more than L2 holds
    print(" | ".join(" ".join(f"{n:6}" for n in slots) for slots in (DECODED, DECODED, VERIFIED)) + "  slots")
    for step in chosen:
        use_step(step)
        times = [" ".join(f"{time_graph(calls, 3):6.1f}" for calls in part) for part in timed_calls(w, states)]
        print(f"{' | '.join(times)}  {step}", flush=True)
    nbytes = 2 * HEADS * DIM * DIM * 4
    print(" ".join(f"{n * nbytes / bandwidth * 1e6:6.1f}" for n in DECODED) + "  floor")
    print(f"-- {time.perf_counter() - begin:.0f} s")


def any_bridge() -> Bridge:
    """One that reads the layer's output as pairs; nothing here multiplies by it."""
    out = LinearWeight(FORMATS["fp8_block"], (5120, HEADS * DIM), ())
    return Bridge(out, torch.ones(5120, device=DEVICE), out, out, None, (), 1e-6)


def check_many(w: GatedDeltaWeights, step: Step) -> list[str]:
    """With more heads of states than multiprocessors, against the kernel of all devices; -> what is wrong."""
    start, wrong = state(journal=DRAFTS), []
    start.conv.normal_()
    start.recurrent.normal_().mul_(0.1)
    slot_ids = torch.randperm(SLOTS, device=DEVICE).to(torch.int32)
    for pairs in (False, True):
        x, results = step_inputs(SLOTS, pairs), []
        for variant in (STEPS[0], step):
            use_step(variant)
            mine = copy.deepcopy(start)
            results.append((kernels.gated_delta_decode(*x, w, mine, slot_ids), mine.recurrent, mine.conv))
        errors = [error(*pair) for pair in zip(*results[::-1], strict=True)]
        if errors[0] > 0.01 or errors[1] > 1e-5 or errors[2] > 0:
            wrong.append(f"errors of {SLOTS} slots: {errors}")
        alone, slot = copy.deepcopy(start), int(slot_ids[-1])
        one: Any = kernels.gated_delta_decode(*(part[..., -1:, :] for part in x), w, alone, slot_ids[-1:])
        if not (torch.equal(one[0], results[1][0][-1]) and torch.equal(alone.recurrent[slot], mine.recurrent[slot])):
            wrong.append(f"a row of {SLOTS} alone is another")
    rows, verified, decoded = inputs(SLOTS * DRAFTS), copy.deepcopy(start), copy.deepcopy(start)
    drafts: Any = kernels.gated_delta_verify(*rows, w, verified, slot_ids, DRAFTS)
    kernels.gated_delta_commit(verified, slot_ids, torch.full_like(slot_ids, DRAFTS))
    for j in range(DRAFTS):
        got: Any = kernels.gated_delta_decode(*(part[j::DRAFTS] for part in rows), w, decoded, slot_ids)
        if not torch.equal(got, drafts[j::DRAFTS]):
            wrong.append(f"verify of {SLOTS} is not decode")
    if not (torch.equal(verified.recurrent, decoded.recurrent) and torch.equal(verified.conv, decoded.conv)):
        wrong.append(f"commit of {SLOTS} is not decode")
    return wrong


def check_steps(w: GatedDeltaWeights) -> list[str]:
    """Against the reference, and the invariances bit for bit; -> what is wrong."""
    start, slot_ids = state(journal=4), ints(5, 0, 31, 7)
    start.conv.normal_()
    start.recurrent.normal_().mul_(0.1)
    x, mine, theirs, verified = inputs(16), copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(start)
    drafts: Any = kernels.gated_delta_verify(*x, w, verified, slot_ids, 4)
    wrong = [] if torch.equal(verified.recurrent, start.recurrent) else ["verify moves the state"]
    kernels.gated_delta_commit(verified, slot_ids, ints(4, 4, 4, 4))
    for j in range(4):
        rows = [part[j::4] for part in x]
        before = copy.deepcopy(mine)
        got: Any = kernels.gated_delta_decode(*rows, w, mine, slot_ids)
        wanted = reference.gated_delta_decode(*rows, w, theirs, slot_ids)
        if error(got, wanted) > 0.01:
            wrong.append(f"error {error(got, wanted):.4f}")
        if not torch.equal(got, drafts[j::4]):
            wrong.append("verify is not decode")
        one: Any = kernels.gated_delta_decode(*(part[2:3] for part in rows), w, copy.deepcopy(before), slot_ids[2:3])
        if not torch.equal(one[0], got[2]):
            wrong.append("a row alone is another")
        paired: Any = kernels.gated_delta_decode(*rows, w, before, slot_ids, readers=any_bridge())
        values = paired.codes.float() * paired.scales.T.repeat_interleave(128, dim=1)
        values = (values[: len(values) // 2] + values[len(values) // 2 :])[:4]
        if error(got, values) > 2**-8 or not torch.equal(before.recurrent, mine.recurrent):
            wrong.append(f"pairs: error {error(got, values):.5f}")
    if error(mine.recurrent, theirs.recurrent) > 1e-4 or not torch.equal(mine.conv, theirs.conv):
        wrong.append(f"states: error {error(mine.recurrent, theirs.recurrent):.6f}")
    if not (torch.equal(mine.recurrent, verified.recurrent) and torch.equal(mine.conv, verified.conv)):
        wrong.append("commit is not decode")
    return wrong


def use(variant: Variant) -> None:
    gated_delta.CONV, gated_delta.SOLVE, gated_delta.SCAN_FEW = variant
    gated_delta.SCAN_MANY = variant[2]


def variants() -> list[Variant]:
    """Every kernel's sizes at least once; the first line has the sizes in use."""
    first = (gated_delta.CONV, gated_delta.SOLVE, gated_delta.SCAN_FEW)
    columns: list[list[Any]] = [
        [own, *(c for c in all_ if c != own)] for own, all_ in zip(first, (CONVS, SOLVES, SCANS), strict=True)
    ]
    count = max(map(len, columns))
    convs, solves, scans = ([c[i] if i < len(c) else c[0] for i in range(count)] for c in columns)
    return list(zip(convs, solves, scans, strict=True))


def compile_in_worker(variant: Variant) -> str:
    use(variant)
    try:
        kernels.gated_delta_prefill(*inputs(64), weights(), state(), *batch([64]))
        torch.cuda.synchronize()
    except Exception as failure:
        return f"no {variant}: {type(failure).__name__} {str(failure).splitlines()[0][:100]}"
    return ""


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def check(w: GatedDeltaWeights) -> None:
    """Prefill against the reference in float32, and the invariances bit for bit."""
    ragged = [1, 63, 64, 65, 130, 700, 2, 3]
    cases = {
        "1 x 8192": batch([8192]),
        "16 x 1024": batch([1024] * 16),
        "ragged": batch(ragged, [0, 1, 64, 5, 0, 100, 62, 6400]),
    }
    start = state()
    start.conv.normal_()
    start.recurrent.normal_().mul_(0.1)
    for name, (slot_ids, bounds, kv_lens) in cases.items():
        x, mine, theirs = inputs(int(bounds[-1])), copy.deepcopy(start), copy.deepcopy(start)
        got = kernels.gated_delta_prefill(*x, w, mine, slot_ids, bounds, kv_lens)
        exact = [part.float() for part in x]
        wanted = reference.gated_delta_prefill(*exact, w, theirs, slot_ids, bounds, kv_lens)
        errors = error(got, wanted), error(mine.recurrent, theirs.recurrent)
        good = errors[0] < 0.03 and errors[1] < 0.02 and torch.equal(mine.conv, theirs.conv)
        print(
            f"{name}: error of outputs {errors[0]:.4f}, of states {errors[1]:.4f} {'' if good else 'WRONG'}", flush=True
        )
        one, part = len(slot_ids) - 1, slice(int(bounds[-2]), int(bounds[-1]))
        alone, length = copy.deepcopy(start), part.stop - part.start
        own = [rows[part] for rows in x]
        out = kernels.gated_delta_prefill(*own, w, alone, ints(one), ints(0, length), kv_lens[-1:].clone())
        same = torch.equal(out, got[part]) and torch.equal(alone.recurrent[one], mine.recurrent[one])
        print(f"  the last sequence alone: {'the same bits' if same else 'OTHER BITS'}")
    x, whole, parts = inputs(1000), copy.deepcopy(start), copy.deepcopy(start)
    got, pieces = kernels.gated_delta_prefill(*x, w, whole, *batch([1000])), []
    for first, last in ((0, 64), (64, 448), (448, 1000)):
        own = [rows[first:last] for rows in x]
        pieces.append(kernels.gated_delta_prefill(*own, w, parts, *batch([last - first], [first])))
    same = torch.equal(torch.cat(pieces), got) and torch.equal(whole.recurrent, parts.recurrent)
    print(f"cut at 64 and 448: {'the same bits' if same else 'OTHER BITS'}", flush=True)
    before, others = gated_delta.SCAN_FEW, []
    for scan in SCANS:
        gated_delta.SCAN_FEW, again = scan, copy.deepcopy(start)
        out = kernels.gated_delta_prefill(*x, w, again, *batch([1000]))
        if not (torch.equal(out, got) and torch.equal(again.recurrent, whole.recurrent)):
            others.append(scan)
    gated_delta.SCAN_FEW = before
    print(f"scans of other sizes: {f'OTHER BITS with {others}' if others else 'the same bits'}", flush=True)


def floors(tokens: int, sequences: int, bandwidth: float) -> list[float]:
    """Microseconds, in the order of KERNELS."""
    tiles, out, states = 2 * HEADS * 64, HEADS * DIM, 2 * sequences * HEADS * DIM * DIM * 4
    numbers = (2 * CHANNELS, 2 * KEY_HEADS * DIM + tiles, CHANNELS + tiles + out, 3 * out)
    return [(tokens * 2 * n + (states if i == 2 else 0)) / bandwidth * 1e6 for i, n in enumerate(numbers)]


def table(w: GatedDeltaWeights, chosen: list[Variant], lengths: list[int], bandwidth: float) -> None:
    """Microseconds of every kernel with every variant."""
    x, where, s = inputs(sum(lengths)), batch(lengths), state()
    before, ready, outputs = (gated_delta.SCAN_FEW, gated_delta.SCAN_MANY), [], []
    print(f"{len(lengths)} x {lengths[0]}")
    whole = time_graph([partial(kernels.gated_delta_prefill, *x, w, s, *where)], 5)
    for variant in chosen:
        use(variant)
        try:
            s.recurrent.zero_()
            s.conv.zero_()
            outputs.append(kernels.gated_delta_prefill(*x, w, s, *where))
            torch.cuda.synchronize()
            ready.append(variant)
        except Exception as failure:
            print(f"  no {variant}: {str(failure).splitlines()[0][:80]}", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for variant in ready:
            use(variant)
            for _ in range(REPEATS):
                kernels.gated_delta_prefill(*x, w, s, *where)
        torch.cuda.synchronize()
    events = sorted(recorded.events() or (), key=lambda event: event.time_range.start)
    times = {k: [event.device_time for event in events if event.name == k] for k in KERNELS}
    print(
        f"  {'conv (runs, run, warps)':>26} {'chunk (base, warps)':>26} {'scan (columns, warps, stages)':>32} {'norm':>6}"
    )
    for i, (conv, solve, scan) in enumerate(ready):
        best = [min(times[k][i * REPEATS + 1 : (i + 1) * REPEATS], default=float("nan")) for k in KERNELS]
        labels = f"{conv.runs},{conv.run},{conv.warps}", f"{solve.base},{solve.warps}"
        state_label = f"{scan.columns},{scan.warps},{scan.stages}"
        same = (
            ""
            if torch.equal(outputs[i], outputs[0])
            else f"  differs from the first: {error(outputs[i], outputs[0]):.4f}"
        )
        print(
            f"  {labels[0]:>18} {best[0]:7.1f} {labels[1]:>18} {best[1]:7.1f} {state_label:>24} {best[2]:7.1f} "
            f"{best[3]:6.1f}{same}"
        )
    conv, chunk, scan_, norm = floors(sum(lengths), len(lengths), bandwidth)
    print(f"  {'floor':>18} {conv:7.1f} {'':18} {chunk:7.1f} {'':24} {scan_:7.1f} {norm:6.1f}")
    print(f"  all, with the sizes in use: {whole:.0f} us", flush=True)
    use(chosen[0])
    gated_delta.SCAN_FEW, gated_delta.SCAN_MANY = before


def prefill(workers: int) -> None:
    begin, chosen = time.perf_counter(), variants()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for failure in filter(None, pool.map(compile_in_worker, chosen)):
            print(failure, flush=True)
    print(f"-- compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    w = weights()
    check(w)
    bandwidth = copy_bandwidth()
    for lengths in ([8192], [1024] * 16):
        table(w, chosen, lengths, bandwidth)
    print(f"-- {time.perf_counter() - begin:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile ahead")
    args = parser.parse_args()
    if args.prefill:
        prefill(args.workers)
    else:
        steps()


if __name__ == "__main__":
    main()
