"""Running a lowered stage over its micro-batches: alone, or as one of several with torch's pipeline schedules.

    runner.prepare(parts)                 this step's inputs, cut; totals over all micro-batches (the prologue)
    losses = train(runner, ...)           forward and backward of every micro-batch, in the order of the schedule
    outputs = infer(runner, ...)          forward only

Every wait has the time limit of its process group; ``runner.doing`` says what the stage was at, for errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from planner.errors import PlanError
from planner.torch_ops import dtype_of
from runtime.batching import Parts
from runtime.groups import Ranks
from runtime.parameters import sharded_modules
from runtime.stage import Crossing, Stage

_COMPUTE = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class StageRunner(nn.Module):
    """A lowered stage with the inputs of the current step. torch's pipeline calls it with what was received and a micro-batch's index."""

    call: Callable[..., Any]

    def __init__(self, stage: Stage, device: torch.device, precision: str = "fp32") -> None:
        super().__init__()
        self.stage, self.device, self.precision = stage, device, precision
        self.module = stage.module
        self.run_through(stage.module)
        self.inputs: list[tuple[Tensor, ...]] = []
        self.totals: tuple[Tensor, ...] = ()
        self.mutated: tuple[Tensor, ...] = ()
        self.losses: list[Tensor] = []
        self.scale = 1.0
        self.doing = "not running"
        self.pipeline: Pipeline | None = None

    def run_through(self, call: Callable[..., Any]) -> None:
        """What stands for the stage's module: the module itself, or another form's way into the base's."""
        # not a submodule: it may be the module of another runner
        object.__setattr__(self, "call", call)

    def prepare(self, parts: Parts) -> None:
        """``parts``: per micro-batch, input name -> local tensor."""
        stage = self.stage
        self.doing = "preparing"
        self.inputs = [tuple(part[name].to(self.device) for name in stage.inputs) for part in parts]
        self.losses, self.mutated, self.totals = [], (), ()
        if stage.prologue is not None:
            self.doing = "prologue"
            with torch.no_grad():
                for i, part in enumerate(parts):
                    found = stage.prologue(*(part[name].to(self.device) for name in stage.prologue_inputs), i)
                    self.totals = tuple(map(torch.add, self.totals, found)) if i else tuple(found)

    def clear(self) -> None:
        self.inputs, self.totals, self.losses, self.mutated = [], (), [], ()
        self.doing = "not running"

    def run(self, received: Sequence[Tensor], index: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(values for the next stage, results) of one micro-batch."""
        self.doing = f"forward of micro-batch {index}"
        with self.compute_dtype():
            outputs = self.call(*received, *self.inputs[index], *self.totals, index)
        crossing, kept = len(self.stage.sends), len(outputs) - len(self.stage.mutations)
        sends, results, mutated = outputs[:crossing], outputs[crossing:kept], outputs[kept:]
        # every micro-batch starts from the same buffers, so each one gives the same new values
        self.mutated = tuple(value.detach() for value in mutated)
        return tuple(self.as_planned(x, c) for x, c in zip(sends, self.stage.sends)), results

    def as_planned(self, x: Tensor, crossing: Crossing) -> Tensor:
        """What the next stage has a buffer for: under mixed precision an op may give another dtype."""
        return x.to(dtype_of(crossing.spec.dtype)).contiguous()

    def compute_dtype(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision not in _COMPUTE:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, _COMPUTE[self.precision], cache_enabled=False)

    def forward(self, *received: Tensor, micro: Tensor) -> Any:
        index = int(micro)
        sends, results = self.run(received, index)
        if not self.stage.has_loss:
            return sends
        self.losses.append(results[0].detach().clone())
        return results[0] if self.scale == 1.0 else results[0] * self.scale

    # ------------------------------------------------------------ fully_shard

    def recover(self) -> None:
        """After an error in the middle of a step, so that the next one starts clean."""
        for module in sharded_modules(self.module):
            # the first one is the root, which resets all of them
            module.reset_iter_state()
            return

    def before_backward(self, index: int, last: bool) -> None:
        """Gradients are summed and scattered after every micro-batch, so that whole ones are never kept."""
        self.doing = f"backward of micro-batch {index}"
        for module in sharded_modules(self.module):
            module.set_is_last_backward(last)
            module.set_requires_gradient_sync(True)


# ---------------------------------------------------------------- training


def train(runner: StageRunner, ranks: Ranks, schedule: str, count: int, before_last: Callable[[], None]) -> None:
    """Forward and backward of ``count`` micro-batches; losses in ``runner.losses``. ``before_last`` is called before the last backward."""
    if runner.stage.count == 1:
        _alone(runner, count, before_last)
    else:
        _schedule(runner, ranks, schedule, count, before_last).run()


def _alone(runner: StageRunner, count: int, before_last: Callable[[], None]) -> None:
    for index in range(count):
        loss = runner(micro=torch.tensor(index))
        runner.before_backward(index, index == count - 1)
        if index == count - 1:
            before_last()
        if loss.requires_grad:
            loss.backward()


class _Stage(PipelineStage):
    """torch's stage, telling the runner and the gradient sync when a backward comes."""

    runner: StageRunner
    before_last: Callable[[], None]

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        self.runner.before_backward(bwd_chunk_id, last_backward)
        if last_backward:
            self.before_last()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.runner.doing = "waiting for a neighbouring stage"


class _OneFOneB(Schedule1F1B):
    """torch refuses fewer micro-batches than stages; its loop is right for them too (the warm-up is then the whole forward)."""

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: Any) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)


SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": _OneFOneB}


class Pipeline:
    """A stage and its schedule, kept from step to step: buffers and connections are made once."""

    def __init__(self, runner: StageRunner, ranks: Ranks, schedule: str, count: int) -> None:
        if schedule not in SCHEDULES:
            raise PlanError(f"schedule {schedule!r} with {runner.stage.count} stages: the runtime has {', '.join(sorted(SCHEDULES))}")
        stage = runner.stage
        outputs = tuple(map(_meta, stage.sends)) or (torch.empty((), device="meta", requires_grad=True),)
        self.stage = _Stage(
            runner, stage.index, stage.count, ranks.device, tuple(map(_meta, stage.receives)), outputs, group=ranks.groups["pipe"]
        )
        self.stage.runner = runner
        self.schedule = SCHEDULES[schedule](self.stage, count, loss_fn=lambda output, _: output, scale_grads=False)
        self.count = count

    def run(self) -> None:
        self.stage.runner.doing = "waiting for a neighbouring stage"
        numbers = torch.arange(self.count)
        # the loss is part of the last stage; the target only satisfies the interface
        self.schedule.step(target=numbers if self.stage.is_last else None, return_outputs=False, micro=numbers)
        self.stage.clear_runtime_states()


def _schedule(runner: StageRunner, ranks: Ranks, schedule: str, count: int, before_last: Callable[[], None]) -> Pipeline:
    if runner.pipeline is None:
        runner.pipeline = Pipeline(runner, ranks, schedule, count)
    runner.pipeline.stage.before_last = before_last
    return runner.pipeline


def _meta(crossing: Crossing) -> Tensor:
    dtype = dtype_of(crossing.spec.dtype)
    return torch.empty(crossing.spec.shape, dtype=dtype, device="meta", requires_grad=crossing.grad and dtype.is_floating_point)


# ---------------------------------------------------------------- inference


@torch.no_grad()
def infer(runner: StageRunner, ranks: Ranks, count: int) -> list[tuple[Tensor, ...]]:
    """Forward of ``count`` micro-batches; per micro-batch the results (nothing on stages before the last)."""
    stage, outputs, sent = runner.stage, [], []
    group = ranks.groups.get("pipe")
    for index in range(count):
        received = []
        for crossing in stage.receives:
            runner.doing = f"receiving micro-batch {index} from stage {stage.index - 1}"
            buffer = torch.empty(crossing.spec.shape, dtype=dtype_of(crossing.spec.dtype), device=ranks.device)
            dist.recv(buffer, group=group, group_src=stage.index - 1)
            received.append(buffer)
        sends, results = runner.run(received, index)
        outputs.append(results)
        for tensor in sends:
            work = dist.isend(tensor, group=group, group_dst=stage.index + 1)
            sent.append((work, tensor))
    for work, _ in sent:
        runner.doing = f"sending to stage {stage.index + 1}"
        if work is not None:
            work.wait()
    return outputs
