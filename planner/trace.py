"""Capture a model as a ``Graph``: export, read, make functional, passes. The one importer of ``torch.export`` and ``torch.fx``.

::

    model, example inputs ──torch.export──▶ fx graph ──trace_read──▶ nodes ──functionalize──▶ nodes ──trace_simplify──▶ Graph

Nothing is computed and, for a model on the meta device, nothing is allocated.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.export
import torch.fx
from torch import nn

from planner import trace_passes as passes
from planner.batch import infer_batch_dims
from planner.compat import fake_cpu
from planner.errors import CaptureError, InputError
from planner.functionalize import functionalize
from planner.graph import CONSTANT, INPUT, PARAMETER, Arg, Graph, Node, Spec, Value, map_values, values_of
from planner.inputs import build, describe, normalise
from planner.opaque import Hidden, OpaqueCall, hide
from planner.outputs import encode, find_loss, map_outputs, output_values
from planner.torch_ops import spec_of
from planner.trace_context import moved, quiet, watch_functions, without_cache
from planner.trace_experts import unsort_experts
from planner.trace_read import ROOT, Raw, Reader, is_library, short
from planner.trace_simplify import Simplifier
from planner.trace_sources import Sources, model_sources, placeholders_of

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Captured:
    """A graph and what belongs to it in this process only."""

    graph: Graph
    constants: dict[str, torch.Tensor]
    """Values of the CONSTANT nodes, by their target."""
    output_types: dict[str, type]
    """Classes of the objects among the outputs, for ``planner.outputs.rebuild``."""
    parameters: dict[str, Spec]
    """Every parameter by its canonical name, used or not."""
    opaque: dict[str, OpaqueCall] = field(default_factory=dict)
    """What runs the ``shard.opaque`` nodes, by their first argument."""


def capture(
    model: nn.Module,
    example_inputs: Any,
    loss: Loss | None = None,
    opaque: Sequence[str] = (),
    batch_dims: Mapping[str, int | None] | None = None,
) -> Captured:
    """Capture ``model`` on one global batch.

    ``example_inputs``: tuple, dict or (args, kwargs), real or meta tensors. ``loss``: called on the model's output, traced in.
    ``opaque``: paths of submodules to take as one op each. ``batch_dims``: input name -> its batch dim (None: none), where it should not
    be found from the graph.

    Raises CaptureError naming the user's own line where the model cannot be captured; InputError for wrong arguments.
    """
    args, kwargs = normalise(example_inputs)
    in_spec, tensors = describe(model, args, kwargs)
    sources = model_sources(model)
    inputs = [Node(f"x.{name}", INPUT, outputs=(spec_of(t),), grad=(False,), target=name) for name, t in tensors.items()]
    with without_cache(model), hide(model, opaque, args, kwargs) as hidden:
        program, found = _export(model, in_spec, tensors, loss, hidden)
    constants, placeholders, extra = placeholders_of(program, sources, inputs)
    raw = Reader([*sources.nodes, *inputs, *extra], placeholders).read(program.graph_module)
    _split_mutations(raw, program, found)
    captured = _finish(raw, found, sources, constants, in_spec, batch_dims)
    used = {node.args[0] for node in captured.graph.of("shard.opaque")}
    return replace(captured, opaque={key: call for key, call in hidden.calls.items() if key in used})


def _split_mutations(raw: Raw, program: Any, found: _Found) -> None:
    """A decomposed program returns what it writes to before its outputs: move that to the end, where ``_Found.mutated`` looks."""
    written = [s for s in program.graph_signature.output_specs if s.kind.name.endswith("MUTATION")]
    values, raw.outputs = raw.outputs[: len(written)], raw.outputs[len(written) :]
    for spec, value in zip(written, values):
        if spec.kind.name != "USER_INPUT_MUTATION":
            found.mutated[(spec.target or "").removeprefix(ROOT + ".")] = len(raw.outputs)
            raw.outputs.append(value)


def _lower_transforms(program: Any) -> Any:
    """``torch.vmap`` and ``torch.func.grad`` leave their bookkeeping in the exported graph; decomposing once resolves it.

    (Not done for all: decomposition fails on some common models, and names in-place writes in the signature instead of the graph.)
    """
    marks = ("_add_batch_dim", "_remove_batch_dim", "_vmap_increment_nesting", "flat_apply")
    if any(getattr(node.target, "__name__", "") in marks for node in program.graph.nodes):
        return program.run_decompositions({})
    return program


def _finish(
    raw: Raw,
    found: _Found,
    sources: Sources,
    constants: dict[str, torch.Tensor],
    in_spec: Any,
    batch_dims: Mapping[str, int | None] | None,
) -> Captured:
    functional = functionalize(raw.nodes, raw.outputs, raw.parent)
    state = Simplifier()
    state.run(functional.nodes)
    results = [state.map(item) for item in functional.outputs]
    mutated = {name: state.map(value) for name, value in functional.mutations}
    everything = [*values_of(tuple(results)), *mutated.values()]
    nodes = passes.live(state.nodes, everything)
    passes.check_static(nodes, raw.dynamic)
    nodes, gone = unsort_experts(nodes, everything)
    results = [map_values(item, lambda v: gone.get(v, v)) for item in results]
    mutated = {name: gone.get(value, value) for name, value in mutated.items()}
    mutated |= {sources.canonical(name): results[i] for name, i in found.mutated.items()}
    encoding = map_outputs(found.encoding, lambda v: results[v.index])
    loss = results[found.loss] if found.loss is not None else None
    wanted = [*output_values(encoding), *mutated.values(), *([loss] if loss is not None else [])]

    nodes = passes.mark_gradients(passes.live(nodes, wanted))
    nodes, first = passes.drop_idle_detach(nodes)
    wanted = [first.get(value, value) for value in wanted]
    nodes, second = passes.rename(passes.live(nodes, wanted))

    def new(value: Value) -> Value:
        return second[first.get(value, value)]

    graph = Graph(
        nodes=tuple(nodes),
        outputs=map_outputs(encoding, new),
        loss=new(loss) if loss is not None else None,
        mutations=tuple((name, new(value)) for name, value in mutated.items()),
        aliases=tuple(sources.aliases.items()),
        in_spec=in_spec,
        frozen=frozenset(node.target for node in nodes if node.op == PARAMETER and not node.grad[0]),
    )
    graph = infer_batch_dims(graph, batch_dims)
    used = {node.target: constants[node.target] for node in graph.of(CONSTANT)}
    parameters = {node.target: node.outputs[0] for node in graph.of(PARAMETER)}
    return Captured(graph, used, found.types, parameters)


# ---------------------------------------------------------------- export


@dataclass
class _Found:
    """What tracing a model told besides its tensors. (Apart from the module: export puts a module's attributes back.)"""

    encoding: Arg = None
    types: dict[str, type] = field(default_factory=dict)
    loss: int | None = None
    """Which of the flat outputs is the loss."""
    mutated: dict[str, int] = field(default_factory=dict)
    """Buffer that forward replaced by assignment -> which of the flat outputs it now is."""


class _Root(nn.Module):
    """What is exported: a list of tensors in, a list of tensors out; structure is kept on the side."""

    def __init__(self, model: nn.Module, in_spec: Any, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        if isinstance(loss, nn.Module):
            self.loss_module = loss
        self._loss, self._in_spec = (loss,), in_spec
        self.found = _Found()

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        names = iter(tensors)
        args, kwargs = build(self._in_spec, lambda leaf: next(names))
        before = dict(self.model.named_buffers())
        output = self.model(*args, **kwargs)
        flat: list[torch.Tensor] = []

        def leaf(tensor: torch.Tensor) -> Value:
            flat.append(tensor)
            return Value("output", len(flat) - 1)

        found = self.found
        found.encoding = encode(output, leaf, found.types)
        scalar = find_loss(output) if self._loss[0] is None else self._loss[0](output)
        if self._loss[0] is not None and not (isinstance(scalar, torch.Tensor) and scalar.dim() == 0):
            what = f"a tensor of shape {tuple(scalar.shape)}" if isinstance(scalar, torch.Tensor) else f"a {type(scalar).__name__}"
            raise InputError(f"loss(output) gave {what}; it must give a scalar tensor")
        if scalar is not None:
            found.loss = leaf(scalar).index
        found.mutated = {n: leaf(b).index for n, b in self.model.named_buffers() if n in before and b is not before[n]}
        return flat


def _export(model: nn.Module, in_spec: Any, tensors: Mapping[str, torch.Tensor], loss: Loss | None, hidden: Hidden) -> tuple[Any, _Found]:
    functions: dict[type, str] = {}
    state = [*model.parameters(), *model.buffers()]
    with contextlib.ExitStack() as stack:
        if any(t.is_meta for t in state):
            device = stack.enter_context(fake_cpu())
            stack.enter_context(moved(model, device))
        else:
            device = state[0].device.type if state else "cpu"
        given = [_example(t, device) for t in tensors.values()]
        stack.enter_context(watch_functions(functions, hidden))
        stack.enter_context(quiet())
        root = _Root(model, in_spec, loss)
        try:
            program = _lower_transforms(_exported(root, given))
        except (InputError, CaptureError):
            raise
        except Exception as error:
            root = _Root(model, in_spec, loss)
            program = _symbolic(root, given, error)
    if functions:
        cls, line = next(iter(functions.items()))
        raise CaptureError(
            f"{line}: the custom autograd function {cls.__module__}.{cls.__qualname__} has its own backward, which capture would lose; "
            f"write it with differentiable torch ops, register it with torch.library.custom_op and register_autograd, "
            f"or name the submodule that calls it: opaque=(path,)"
        )
    return program, root.found


def _exported(root: nn.Module, given: list[torch.Tensor]) -> Any:
    """Exports; what a failing export prints (the whole graph so far) is dropped, what the model prints is passed on."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        program = torch.export.export(root, (given,), strict=False)
    sys.stdout.write(out.getvalue())
    sys.stderr.write(err.getvalue())
    return program


def _example(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A stand-in of the same shape. Values do not matter, and the caller's tensor is left alone."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


def _symbolic(root: _Root, given: list[torch.Tensor], first: Exception) -> Any:
    """Second try: ``torch.fx.symbolic_trace`` takes some models whose Python disturbs export. Raises CaptureError for ``first``."""
    model = root.model
    try:
        root.model = torch.fx.symbolic_trace(model)
        return _exported(root, given)
    except Exception:
        root.model = model
        raise _export_error(root, first) from first


def _export_error(root: _Root, error: Exception) -> CaptureError:
    """Names the user's own module and line (the last frame outside torch), what went wrong there, and what to do."""
    walked = [frame for e in _chain(error) for frame in traceback.walk_tb(e.__traceback__)]
    frames = [(frame, line) for frame, line in walked if not is_library(frame.f_code.co_filename)]
    names = {id(module): name for name, module in root.model.named_modules()}
    path = next((names[id(f.f_locals["self"])] for f, _ in reversed(walked) if id(f.f_locals.get("self")) in names), "")
    where = code = ""
    if frames:
        frame, line = frames[-1]
        text = linecache.getline(frame.f_code.co_filename, line).strip()
        where = f"{short(frame.f_code.co_filename)}:{line}"
        code = f" in `{text}`" if text else ""
    what = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    way_on = f"opaque=({path!r},)" if path else "opaque=(path,)"
    return CaptureError(
        f"{where or 'the model'}{code} (module {path or type(root.model).__name__!r}): the model cannot be captured as a graph "
        f"({type(error).__name__}: {what[:300]}). Where the code depends on the values of tensors, write it with torch.where, masks or "
        f"fixed sizes, or name the submodule that holds it: {way_on}"
    )


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    return chain[::-1]
