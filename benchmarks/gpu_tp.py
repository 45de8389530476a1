"""Tensor parallelism on GPUs: does the plan hold under a cap, how long is a step, what do the sums cost?

    python benchmarks/gpu_tp.py [--model NAME] [--ranks 2] [--limit 22GiB] [--parts same,fit,steps,...] [--out FILE] ...

Weights are dummy ones, caches are filled with random values. Parts, in this order:

    same    a small model in float32 on one rank and on all: largest difference of the logits, and whether tokens are equal
    fit     the model with each of --fits (slots x context x KV type), each rank capped at --limit: what the plan says, what
            rank 0's device gave, a long prompt, decode steps up to the last token, and rank 0's largest kernels
    most    the largest context the plan gives each of --slots slots, for every KV type of --formats, built and filled so
    steps   decode steps on all ranks and (unless --all-only) on one, for every KV type of --formats and case of --cases
    shard   the same of one rank that adds nobody's sums to its own, on one GPU: what `steps` takes more is the sums' share
    death   a rank is killed while tokens are made: seconds until the engine says so, and what stays of its device's memory

Each finding is one line of JSON, printed as it comes and added to --out. A part that fails says so; the others go on.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pocketllm.cli.bench_run import context_needed, fill_randomly, random_tokens, timed_decode
from pocketllm.engine.engine import Engine
from pocketllm.engine.memory_plan import gib, plan_memory
from pocketllm.engine.ranks import ProcessRanks, ProcessWorker
from pocketllm.engine.slot_engine import SlotRequest
from pocketllm.errors import MemoryPlanError, RankError
from pocketllm.layers.embedding import Vocabulary
from pocketllm.models.registry import read_model
from pocketllm.options import EngineOptions, SamplingParams, parse_bytes
from pocketllm.parallel import Part, TensorParallel

CASES = "1x1024,8x1024,32x1024,8x32768"
FITS = "8x65536xturboquant_k8v4,4x65536xint8_per_token_head,2x65536xfp16"
PAGE = 256  # tokens: what a slot may hold beyond its own, its last page being part empty
SUMMED = 8  # steps under the profiler
PROBED = 12  # tokens after a prompt whose logits are compared
NAMED = 8  # kernels of a step that `fit` names


@dataclass(frozen=True)
class LoneShard(TensorParallel):
    """Has rank 0's shard of `ranks`, and takes its own summands for the sums: the work of a rank without the meetings."""

    ranks: int = 2

    def shard(self, total: int, what: str) -> Part:
        return TensorParallel(0, self.ranks).shard(total, what)

    def replicate_or_shard(self, heads: int, what: str) -> Part:
        return TensorParallel(0, self.ranks).replicate_or_shard(heads, what)

    def gather(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.ranks)


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.cuda = args, args.device == "cuda"

    def note(self, part: str, **values: Any) -> None:
        line = json.dumps({"part": part, **values})
        print(line, flush=True)
        if self.args.out is not None:
            with self.args.out.open("a") as file:
                file.write(line + "\n")

    def engine(self, ranks: int, **options: Any) -> Engine:
        chosen = {"model": self.args.model, "load_format": "dummy", "device": self.args.device, **options}
        return Engine(chosen.pop("model"), tensor_parallel=ranks, kernels=self.args.kernels, **chosen)

    def free_memory(self) -> int:
        """Bytes of rank 0's device that nobody has, after Python has given back what it can."""
        gc.collect()
        if not self.cuda:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(0)[0]

    # -- parts -------------------------------------------------------------------------------------------------------

    def same(self) -> None:
        logits, tokens = [], []
        for ranks in (1, self.args.ranks):
            engine = self.engine(
                ranks, model=self.args.small, dtype="float32", max_batch_size=2, max_context=512, prefill_chunk=64
            )
            slot = engine.acquire_slot(256)
            (result,) = engine.batch_prefill([SlotRequest(slot, random_tokens(engine, 200, 1))])
            if result.error is not None or result.logits is None:
                raise RuntimeError("the prompt has no logits") from result.error
            logits.append(result.logits.cpu())
            engine.release_slot(slot)
            params = SamplingParams(max_tokens=32, ignore_eos=True)
            engine.add_request(random_tokens(engine, 100, 2), params)
            engine.add_request(random_tokens(engine, 7, 3), params)
            found: dict[str, list[int]] = {}
            while engine.has_work:
                for output in engine.step():
                    found.setdefault(output.request_id, []).extend(output.new_token_ids)
            tokens.append(found)
            engine.close()
        difference = float((logits[0] - logits[1]).abs().max())
        self.note("same", model=self.args.small, logits_differ_by=difference, tokens_equal=tokens[0] == tokens[1])

    def fit(self) -> None:
        for case in self.args.fits.split(","):
            num_slots, context, kv = case.split("x", 2)
            self.fit_one("fit", int(num_slots), int(context), kv)

    def most(self) -> None:
        checkpoint = read_model(self.args.model, "dummy")
        for kv in self.args.formats.split(","):
            for num_slots in map(int, self.args.slots.split(",")):
                options = EngineOptions(**self.sizes(num_slots, None, kv))
                plan = plan_memory(
                    checkpoint.config, options, parse_bytes(self.args.limit), self.args.device, checkpoint.storage
                )
                self.fit_one("most", num_slots, plan.max_context, kv)

    def sizes(self, num_slots: int, context: int | None, kv: str) -> dict[str, Any]:
        args = self.args
        return {
            "max_batch_size": num_slots,
            "max_context": context,
            "kv_layout": "slots",
            "kv_cache_dtype": kv,
            "quantize_embeddings": args.quantize_embeddings,
            "tensor_parallel": args.ranks,
            "kernels": args.kernels,
            "load_format": "dummy",
        }

    def fit_one(self, part: str, num_slots: int, context: int, kv: str) -> None:
        args = self.args
        options = EngineOptions(**(sizes := self.sizes(num_slots, context, kv)))
        checkpoint = read_model(args.model, "dummy")
        limit = parse_bytes(args.limit)
        plan = plan_memory(checkpoint.config, options, limit, args.device, checkpoint.storage)
        self.note(part, limit=gib(limit), planned=gib(plan.total), weights=gib(plan.weights), kv=gib(plan.kv.nbytes),
                  state=gib(plan.state.nbytes), workspace=gib(plan.workspace), fits=plan.fits)  # fmt: skip
        free, start = self.free_memory(), time.monotonic()
        try:
            engine = Engine(args.model, memory_limit=limit, device=args.device, **sizes)
        except MemoryPlanError as error:
            self.note(part, refused=str(error))
            return
        built = time.monotonic() - start
        self.long_prompt(engine, min(2 * options.chunk_tokens(engine.device.type), context))
        length = context - args.steps - SUMMED  # the last token is the last step's
        slots = [engine.acquire_slot(context) for _ in range(num_slots)]
        fill_randomly(engine, {slot: random_tokens(engine, length, slot) for slot in slots})
        times = []
        for step in range(args.steps):
            begin = time.perf_counter()
            results = engine.batch_decode([SlotRequest(slot, [step + 7]) for slot in slots])
            times.append(time.perf_counter() - begin)
            for result in results:
                if result.error is not None:
                    raise result.error
        taken = free - torch.cuda.mem_get_info(0)[0] if self.cuda else 0
        self.note(part, slots=num_slots, context=context, kv=kv, build_seconds=round(built, 1),
                  held=[engine.slot_length(slot) for slot in slots], step_ms=round(statistics.median(times) * 1e3, 2),
                  device_gave=gib(taken), within=taken <= limit)  # fmt: skip
        if part == "fit":
            self.kernels(engine, slots)
        engine.close()

    def long_prompt(self, engine: Engine, length: int) -> None:
        """A slot of its own computes one: no pass takes more memory."""
        slot = engine.acquire_slot(length)
        (result,) = engine.batch_prefill([SlotRequest(slot, random_tokens(engine, length, 1))])
        if result.error is not None:
            raise result.error
        engine.release_slot(slot)

    def kernels(self, engine: Engine, slots: list[int]) -> None:
        """Rank 0's time in kernels, by the profiler; waiting for the others is in the kernels that do."""
        with profile(activities=[ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU]) as recorded:
            for step in range(SUMMED):
                for result in engine.batch_decode([SlotRequest(slot, [step + 7]) for slot in slots]):
                    if result.error is not None:
                        raise result.error
        spent: dict[str, float] = {}
        for event in recorded.key_averages():
            name = event.key.split("(")[0][:48]
            time_us = event.device_time_total if self.cuda else event.self_cpu_time_total
            spent[name] = spent.get(name, 0.0) + time_us / 1e3 / SUMMED
        largest = sorted(spent.items(), key=lambda pair: -pair[1])[:NAMED]
        self.note(
            "fit", ms_of_a_step=round(sum(spent.values()), 3), kernels={name: round(ms, 3) for name, ms in largest}
        )

    def probe(self, engine: Engine) -> torch.Tensor:
        """Logits [P, V] of a prompt's last token and of some given ones after it. (Of a short prompt: more than 64 tokens
        are rounded to e4m3, whose errors differ where sums do.)"""
        room = min(engine.plan.max_context, 50 + PROBED)
        slot, rows = engine.acquire_slot(room), []
        for ids in (random_tokens(engine, room - PROBED, 5), *([t] for t in random_tokens(engine, PROBED, 6))):
            call = engine.batch_decode if rows else engine.batch_prefill
            (result,) = call([SlotRequest(slot, ids)])
            if result.error is not None or result.logits is None:
                raise RuntimeError("a token has no logits") from result.error
            rows.append(result.logits.float().cpu().flatten())
        engine.release_slot(slot)
        return torch.stack(rows)

    def step_sizes(self) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
        cases = [tuple(map(int, case.split("x"))) for case in self.args.cases.split(",")]
        count = self.args.steps
        return cases, {
            "max_batch_size": max(slots for slots, _ in cases),
            "max_context": max(context_needed(context, count) for _, context in cases),
            "kv_tokens": max(slots * (context_needed(context, count) + PAGE) for slots, context in cases),
        }

    def step_ms(self, engine: Engine, cases: list[tuple[int, ...]]) -> dict[str, float]:
        found = {}
        for slots, context in cases:
            prompts = [random_tokens(engine, context + 1, slot) for slot in range(slots)]
            seconds = statistics.median(timed_decode(engine, prompts, self.args.steps, "random").step_seconds)
            found[f"{slots}x{context}"] = round(seconds * 1e3, 3)
        return found

    def steps(self) -> None:
        cases, sizes = self.step_sizes()
        for kv in self.args.formats.split(","):
            found: dict[int, dict[str, float]] = {}
            logits: list[torch.Tensor] = []
            for ranks in (self.args.ranks,) if self.args.all_only else (1, self.args.ranks):
                self.free_memory()
                engine = self.engine(ranks, kv_cache_dtype=kv, **sizes)
                logits.append(self.probe(engine))
                found[ranks] = self.step_ms(engine, cases)
                engine.close()
                del engine
                self.note("steps", kv=kv, ranks=ranks, step_ms=found[ranks])
            if self.args.all_only:
                continue
            off = float((logits[0] - logits[1]).norm() / logits[0].norm())
            agreed = float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean())
            self.note("steps", kv=kv, logits_off_by=round(off, 4), same_tokens=round(agreed, 3))
            one, many = found[1], found[self.args.ranks]
            self.note("steps", kv=kv, speedup={case: round(one[case] / many[case], 2) for case in one})

    def shard(self) -> None:
        cases, sizes = self.step_sizes()

        def lone(*_: Any) -> TensorParallel:
            return LoneShard(ranks=self.args.ranks)

        def embed(vocabulary: Vocabulary, token_ids: Tensor) -> Tensor:
            return embed_own(vocabulary, token_ids % vocabulary.table.shape[0])

        embed_own = Vocabulary.embed
        for kv in self.args.formats.split(","):
            self.free_memory()
            with (
                patch("pocketllm.engine.memory_plan.TensorParallel", lone),
                patch("pocketllm.engine.slot_engine.TensorParallel", lone),
                patch.object(Vocabulary, "embed", embed),
            ):
                engine = self.engine(1, kv_cache_dtype=kv, **sizes)
                self.note("shard", kv=kv, of_ranks=self.args.ranks, step_ms=self.step_ms(engine, cases))
            engine.close()
            del engine

    def death(self) -> None:
        engine = self.engine(self.args.ranks, max_batch_size=2, max_context=4096)
        assert isinstance(engine._ranks, ProcessRanks)
        victim = next(worker.process for worker in engine._ranks._workers if isinstance(worker, ProcessWorker))
        engine.add_request(random_tokens(engine, 64, 1), SamplingParams(max_tokens=4000, ignore_eos=True))
        for _ in range(20):
            engine.step()
        before = torch.cuda.mem_get_info(1)[0] if self.cuda else 0
        victim.kill()
        start, said = time.monotonic(), ""
        try:
            while engine.has_work:
                engine.step()
        except RankError as error:
            said = str(error)
        seconds = time.monotonic() - start
        engine.close()
        victim.wait()
        freed = torch.cuda.mem_get_info(1)[0] - before if self.cuda else 0
        self.note("death", said=said, after_seconds=round(seconds, 2), device_1_got_back=gib(freed))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.8-27b-fp8", help="a shape, or a folder whose shape is taken")
    parser.add_argument("--small", default="qwen3.5-0.8b", help="the model of `same`")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", default="22GiB", help="of each rank")
    parser.add_argument("--fits", default=FITS)
    parser.add_argument("--slots", default="1,2,4,8", help="of `most`")
    parser.add_argument("--all-only", action="store_true", help="`steps` without one rank")
    parser.add_argument("--quantize-embeddings", default="w8", choices=("none", "w8", "fp8"), help="in `fit`")
    parser.add_argument("--formats", default="fp16,int8_per_token_head,turboquant_k8v4")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--parts", default="same,fit,steps,death")
    parser.add_argument("--patience", type=float, default=0, help="seconds for a part; then it ends, saying where")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--out", type=Path)
    run = Run(args := parser.parse_args(arguments))
    name = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    run.note("start", device=name, ranks=args.ranks, torch=torch.__version__,
             date=datetime.now(UTC).isoformat(timespec="seconds"))  # fmt: skip
    known: dict[str, Callable[[], None]] = {
        "same": run.same, "fit": run.fit, "most": run.most, "steps": run.steps, "shard": run.shard, "death": run.death
    }  # fmt: skip
    for part in args.parts.split(","):
        begin = time.monotonic()
        if args.patience:  # ranks that wait for each other may wait for ever
            faulthandler.dump_traceback_later(args.patience, exit=True)
        try:
            known[part]()
        except Exception as error:
            traceback.print_exc()
            run.note(part, failed=f"{type(error).__name__}: {error}"[:500])
        finally:
            faulthandler.cancel_dump_traceback_later()
        run.note(part, seconds=round(time.monotonic() - begin, 1))


if __name__ == "__main__":
    main()
