"""How ranks come into being: what all do alike (find device and memory, plan, build a runner), and rank 0 for the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pocketllm.engine.device import (
    allocate_exactly,
    available_memory,
    limit_memory,
    of_one_kind,
    pick_device,
    set_cache_aside,
)
from pocketllm.engine.lead import LeadRunner, Ranks
from pocketllm.engine.memory_advice import check_fits
from pocketllm.engine.memory_plan import MemoryPlan, compute_dtype, gib, plan_memory
from pocketllm.engine.runner import ModelRunner
from pocketllm.errors import MemoryPlanError
from pocketllm.kernels import select_kernels
from pocketllm.kernels.protocol import Kernels
from pocketllm.models.registry import Checkpoint
from pocketllm.options import EngineOptions
from pocketllm.parallel import TensorParallel
from pocketllm.weights.base import Policy


@dataclass(frozen=True)
class RankBuilder:
    """One rank's device, and the model it will have."""

    checkpoint: Checkpoint
    options: EngineOptions
    kernels: Kernels
    device: torch.device

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, options: EngineOptions, rank: int, backend: Kernels | None = None
    ) -> RankBuilder:
        """OptionError if the rank's device or the kernels that `options` ask for are not to be had."""
        device = pick_device(options.device, rank, options.tensor_parallel)
        kernels = backend or select_kernels(options.kernels, device.type)
        kernels.set_num_threads(options.num_threads())
        return cls(checkpoint, options, kernels, device)

    def budget(self) -> int | None:
        """Bytes this rank may plan with; None where the system does not say."""
        return self.options.memory_limit or available_memory(self.device, self.options.tensor_parallel)

    def plan(self, budget: int | None) -> MemoryPlan:
        """The same on every rank for the same budget. MemoryPlanError if it does not fit."""
        arguments = self.device.type, self.checkpoint.storage
        plan = plan_memory(self.checkpoint.config, self.options, budget, *arguments)
        check_fits(plan, self.checkpoint.config, self.options, *arguments)
        return plan

    def build(self, plan: MemoryPlan, tp: TensorParallel) -> ModelRunner:
        """Allocates what the plan says. MemoryPlanError if the device has less than it said."""
        options, config = self.options, self.checkpoint.config
        allocate_exactly(self.device)
        if self.kernels.name == "triton":
            set_cache_aside(self.device)
        limit_memory(self.device, None if options.memory_limit is None else options.memory_limit - plan.runtime)
        try:
            policy = Policy.of(options, compute_dtype(options, self.device.type), self.kernels)
            source = self.checkpoint.open_source(policy, self.device, options.seed)
            if self.device.type == "cuda" and self.kernels.meets_ranks:
                self._open_places(tp)
            return ModelRunner(config, options, plan, source, self.kernels, self.device, tp)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise MemoryPlanError(f"the device had less memory than the planned {gib(plan.total)}: {error}") from error

    def _open_places(self, tp: TensorParallel) -> None:
        """For ranks on GPUs of one kind: how a kernel splits its sums, others of it read, depends on the GPU."""
        if of_one_kind(self.device, tp.rank, tp.size):
            tp.open_places(self.checkpoint.config.hidden_size)
        elif tp.rank == 0:
            print("the ranks' GPUs differ: sums over the ranks go through NCCL, which is slower", file=sys.stderr)


Launch = Callable[[Checkpoint, EngineOptions, torch.device], Ranks]  # rank 0's device


def build_group(builder: RankBuilder, launch: Launch) -> tuple[MemoryPlan, LeadRunner, Ranks]:
    """All ranks, from rank 0's point of view. If one fails, its error is raised and none of them stays."""
    builder.plan(None)  # what can't be sharded is refused before anything is started
    ranks = launch(builder.checkpoint, builder.options, builder.device)
    try:
        budget = ranks.meet(builder.budget())
        plan = builder.plan(budget)
        runner = builder.build(plan, ranks.build(budget))
        ranks.wait_ready()
    except BaseException:
        ranks.close()
        raise
    return plan, LeadRunner(runner, ranks), ranks
