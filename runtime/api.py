"""``parallelize``: a model and a plan become a module that trains on all ranks of the plan.

    parallel = parallelize(model, plan)
    optimizer = torch.optim.AdamW(parallel.parameters())
    loss = parallel.step(input_ids=ids, labels=ids)      # gradients are in .grad
    parallel.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import InputError, PlanError, ShardwrightError, WorkerError
from planner.graph import Value
from planner.inputs import bind
from planner.mesh import DATA, PIPE
from planner.outputs import rebuild
from planner.plan import Plan
from runtime import checkpoint, collectives, compiled
from runtime.batching import Batch, Parts, cut, expected_spec
from runtime.clip import clip_gradients
from runtime.data import BatchLoader, dataloader
from runtime.fit import Loss, recapture, tensor_shapes, warn_of_differences
from runtime.groups import check_same_plan, check_world, home_device, start_world
from runtime.local_op import RANDOM
from runtime.lower import lower
from runtime.outputs import OutputLayout, join
from runtime.pipeline import StageRunner, infer, train
from runtime.samples import Collate
from runtime.scaling import LossScale
from runtime.setup import Form, Prepared, across_stages, prepare, share_buffers
from runtime.state import register_tree
from runtime.sync import GradientSync


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    batch: Batch = "global",
    outputs: Literal["global", "local"] = "global",
    compile: bool = False,
    loss: Loss | None = None,
    opaque: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> ParallelModule:
    """Run ``model`` as ``plan`` says; called on every rank (by torchrun, ``runtime.launch``, or with a process group up).

    ``model``: the unmodified model, with memory or on the meta device; it is only read, except that ranks whose models differ take
    the first rank's values. ``batch``: what calls are given on every rank, the whole batch or "local", this rank's part of it.
    ``outputs``: what a forward returns, whole tensors or "local", this rank's part of the batch. ``compile``: ``torch.compile`` each
    segment. ``loss``, ``opaque``: the loss function and the submodules taken as one op that the plan was made with (a plan file has
    neither). ``timeout_s``: limit of every wait.

    Raises PlanError, before any process group work, where the number of processes, the model, its shapes or the loss are not the
    planned ones, or where ranks were given different plans.
    """
    for name, value, known in (("batch", batch, ("global", "local")), ("outputs", outputs, ("global", "local"))):
        if value not in known:
            raise InputError(f"{name}={value!r}, must be one of {known}")
    check_world(plan.world_size)
    captured = recapture(model, plan, loss, opaque)
    device = home_device(any(p.is_cuda for p in model.parameters()))
    start_world(plan.world_size, timeout_s, device)
    check_same_plan(plan.to_json())
    warn_of_differences(plan, device, dist.get_rank() if dist.is_initialized() else 0)
    return ParallelModule(prepare(model, plan, captured, device, timeout_s, compile), model, batch, outputs, compile)


class ParallelModule(nn.Module):
    """A model split over ranks. Its parameters carry the model's own names and are DTensors (plain tensors for a plan of one process).

    With pipeline stages, a rank has the parameters of its own stage only.
    """

    _own: _Own

    def __init__(self, prepared: Prepared, model: nn.Module, batch: Batch, outputs: str, compile: bool) -> None:
        super().__init__()
        # plain attributes behind one object: nothing of it may show up among this module's own parameters and submodules
        object.__setattr__(self, "_own", _Own(prepared, model, batch, outputs, compile))
        state, persistent = prepared.state, set(prepared.state.keys)
        names = {name: name for name in [*state.held, *state.buffers]} | state.aliases
        for name, canonical in names.items():
            if canonical in state.held:
                register_tree(self, name, state.held[canonical].parameter)
            elif canonical in state.buffers:
                register_tree(self, name, state.buffers[canonical], name in persistent)
        self.train(model.training)

    @property
    def plan(self) -> Plan:
        return self._own.plan

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward over all micro-batches and stages; gradients are added to ``.grad``. Returns the loss over the global
        batch, the same on every rank, detached.

        A step that fails leaves gradients as they were before it. Raises PlanError where the inputs are not the planned ones;
        WorkerError naming rank, stage and what it was doing when a collective fails or a wait passes its limit.
        """
        return self._own.step(self.training, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in the model's own structure, without gradient; tensors whole on every rank (or this rank's part)."""
        return self._own.forward(self.training, args, kwargs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale gradients to a total norm, over all axes, of at most ``max_norm``; returns the norm before."""
        own = self._own
        return clip_gradients(own.state.held.values(), own.ranks, max_norm, norm_type, error_if_nonfinite)

    def dataloader(
        self, dataset: Any, batch_size: int, seed: int = 0, *, shuffle: bool | None = None, drop_last: bool = True, num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> BatchLoader:  # fmt: skip
        """Batches for ``step``, as torch's DataLoader makes them: the whole global batch, or this rank's part where ``batch="local"``.

        ``dataset``: map-style or iterable, the same on every rank. ``batch_size``: the plan's, over all ranks and micro-batches.
        ``seed``: of the order and of random numbers drawn by the dataset or ``collate_fn``; the process's own are left alone.
        ``shuffle``: None: yes, unless the dataset is a stream. ``drop_last``: a plan is for one shape, so a last incomplete batch is left
        out; False fills it up with samples from the start of the epoch, which then count twice (as torch's DistributedSampler does).
        ``num_workers``: processes that load; each reads its own copy of a stream (``torch.utils.data.get_worker_info`` tells which).

        The loader has ``set_epoch``, ``state_dict`` and ``load_state_dict`` (also in the middle of an epoch, and under another layout).
        Raises InputError where the batch size is not the plan's, or ranks do not agree on settings or length. Collective.
        """
        options: dict[str, Any] = dict(shuffle=shuffle, drop_last=drop_last, num_workers=num_workers, collate_fn=collate_fn)
        return dataloader(self._own.plan, self._own.ranks, self._own.batch, dataset, batch_size, seed, **options)

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Name -> whole gradient (None where the plain model has none), on every rank; collective."""
        return self._own.state.gather_gradients()

    def gather_state_dict(self) -> dict[str, Tensor]:
        """The model's own ``state_dict()``, whole tensors on every rank; collective."""
        return self._own.state.gather_state_dict()

    def save(self, directory: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint that any layout can load; the one before stays whole until the new one is. Collective."""
        checkpoint.save(self._own.state, Path(directory), optimizer)

    def load(self, directory: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read a checkpoint of any layout. Raises CheckpointError where it is damaged or belongs to another model. Collective."""
        checkpoint.load(self._own.state, Path(directory), optimizer)


class _Own:
    """What a ParallelModule works with."""

    def __init__(self, prepared: Prepared, model: nn.Module, batch: Batch, outputs: str, compile: bool) -> None:
        self.prepared, self.model, self.batch, self.outputs, self.compile = prepared, model, batch, outputs, compile
        self.plan, self.ranks, self.state = prepared.plan, prepared.ranks, prepared.state
        self.graph, self.mesh = prepared.captured.graph, prepared.ranks.mesh
        data = self.ranks.coordinates[DATA]
        self.spec = expected_spec(self.plan.model.inputs, self.plan.model.batch_dims, self.mesh, data, batch)
        shapes = tensor_shapes(self.plan.model.inputs)
        self.sizes = {name: shapes[name][dim] for name, dim in self.plan.model.batch_dims.items()}
        self.runners: dict[Form, StageRunner] = {}
        self.output_layout = OutputLayout.of(prepared)
        self._makers: dict[tuple[int, int], dict[str, int]] = {}
        self.sync = GradientSync(self.state.held, self.ranks, (stored.stages for stored in self.state.stored.values()))
        self.scale = LossScale(self.plan.precision, self.ranks)
        RANDOM.seed, RANDOM.step = prepared.seed, 0
        self.runner(prepared.base)

    def runner(self, form: Form) -> StageRunner:
        if form not in self.runners:
            prepared = self.prepared
            if form not in prepared.stages:
                prepared.stages[form] = lower(
                    self.graph, self.plan, self.ranks.coordinates, mode=form[0], training=form[1], opaque=prepared.captured.opaque
                )
            stage = prepared.stages[form]
            runner = StageRunner(stage, self.ranks.device, self.plan.precision)
            if form != prepared.base:
                if self.compile:
                    compiled.step_around(stage)
                    compiled.compile_segments(stage)
                runner.run_through(prepared.variants.install(stage, self.state.held))
            share_buffers(stage, prepared.captured.constants, self.state, prepared.stages[prepared.base])
            self.runners[form] = runner
        return self.runners[form]

    def parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Parts:
        self.state.check_set()
        named = bind(self.spec, args, kwargs, self.model)
        return cut(named, self.sizes, self.plan.model.batch_dims, self.mesh, self.ranks.coordinates[DATA], self.batch)

    # ------------------------------------------------------------ calls

    def step(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.graph.loss is None:
            raise PlanError("step() needs a loss, and this model was captured without one: pass loss= to auto_parallelize")
        parts = self.parts(args, kwargs)
        runner = self.runner(("step", training))
        with self.at_work(runner), torch.enable_grad():
            self.sync.begin()
            try:
                runner.prepare(parts)
                runner.scale = self.scale.value
                train(runner, self.ranks, self.plan.schedule, self.mesh.microbatches, self.sync.arm)
                runner.doing = "gradient sums"
                self.sync.finish()
                self.scale.unscale(self.state.held.values())
            except BaseException:
                self.drop_gradients()
                raise
            finally:
                self.sync.restore()
            self.update_buffers(runner)
            return self.shared_loss(runner)

    def drop_gradients(self) -> None:
        """Of parameters, and of what fully_shard has gathered at the moment."""
        gathered = self.prepared.stages[self.prepared.base].module.parameters()
        for parameter in [*gathered, *(one.parameter for one in self.state.held.values())]:
            parameter.grad = None

    def forward(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = self.parts(args, kwargs)
        runner = self.runner(("forward", training))
        with self.at_work(runner):
            runner.prepare(parts)
            results = infer(runner, self.ranks, self.mesh.microbatches)
            runner.doing = "sharing outputs"
            values: dict[Value, Tensor] = join(results, self.prepared, self.output_layout, self.outputs, training)
            self.update_buffers(runner)
        return rebuild(self.graph.outputs, values, self.prepared.captured.output_types)

    @contextlib.contextmanager
    def at_work(self, runner: StageRunner) -> Iterator[None]:
        """Groups active, errors named by rank, stage and what it was doing; random numbers move on."""
        RANDOM.step += 1
        try:
            with collectives.use(self.ranks.axes):
                yield
        except RuntimeError as error:
            runner.recover()
            if isinstance(error, ShardwrightError) and not isinstance(error, WorkerError):
                raise
            kind = "" if isinstance(error, WorkerError) else f"{type(error).__name__}: "
            raise WorkerError(f"{self.ranks.place}, {runner.doing}: {kind}{error}") from error
        finally:
            runner.clear()

    def shared_loss(self, runner: StageRunner) -> Tensor:
        """The sum over micro-batches (each is a pending part of the global mean), from the last stage."""
        assert self.graph.loss is not None
        if runner.stage.has_loss:
            loss = torch.stack(runner.losses).sum(0)
        else:
            loss = torch.empty((), dtype=getattr(torch, self.graph.spec(self.graph.loss).dtype), device=self.ranks.device)
        if self.mesh.pipe > 1:
            loss = loss.to(getattr(torch, self.graph.spec(self.graph.loss).dtype))
            dist.broadcast(loss, group=self.ranks.groups[PIPE], group_src=self.mesh.pipe - 1)
        return loss

    @torch.no_grad()
    def update_buffers(self, runner: StageRunner) -> None:
        """New values from the stage that computed them to every rank."""
        mine = dict(zip(runner.stage.mutations, runner.mutated))
        mutated = [name for name, _ in self.graph.mutations] if mine or self.mesh.pipe > 1 else []
        for name in mutated:
            buffer = self.state.buffers[self.state.canonical(name)]
            if name in mine:
                buffer.copy_(mine[name])
            if self.mesh.pipe > 1 and (maker := self.makers(runner).get(name)) is not None:
                dist.broadcast(buffer, group=self.ranks.groups[PIPE], group_src=maker)

    def makers(self, runner: StageRunner) -> dict[str, int]:
        """Buffer -> the one stage that computes it; those that every stage computes are left out."""
        form = (runner.stage.index, id(runner))
        if form not in self._makers:
            everywhere = across_stages(list(runner.stage.mutations), self.ranks)
            self._makers[form] = {n: s[0] for n, s in everywhere.items() if len(s) < self.mesh.pipe}
        return self._makers[form]
