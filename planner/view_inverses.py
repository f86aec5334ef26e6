"""How to write through a view: per view op, the op that gives the base again with the viewed part replaced.

An op called ``*_scatter`` takes (base, new part, ...); any other takes the new part alone, for views that show the whole base.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.graph import Arg, Node

Undo = tuple[str, tuple[Arg, ...]]
Inverse = Callable[[Node, int, tuple[int, ...]], Undo]
"""(the view's node, which of its outputs, the base's shape) -> (op, further arguments)."""


def _reshape(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    return "aten.reshape.default", (shape,)


def _same(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    return node.op, tuple(node.args[1:])


def _complex(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    return "aten.view_as_complex.default", ()


def _real(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    return "aten.view_as_real.default", ()


def _permute(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    dims = [dim % len(shape) for dim in node.args[1]]
    return "aten.permute.default", (tuple(dims.index(i) for i in range(len(dims))),)


def _slice(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    given = [node.arg(i + 1, name, default) for i, (name, default) in enumerate((("dim", 0), ("start", None), ("end", None), ("step", 1)))]
    return "aten.slice_scatter.default", tuple(given)


def _narrow(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    dim, start, length = node.args[1:4]
    return "aten.slice_scatter.default", (dim, start, start + length)


def _split(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    dim = node.arg(2, "dim", 0) % len(shape)
    start = sum(spec.shape[dim] for spec in node.outputs[:index])
    return "aten.slice_scatter.default", (dim, start, start + node.outputs[index].shape[dim])


def _select(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    return "aten.select_scatter.default", tuple(node.args[1:3])


def _unbind(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    return "aten.select_scatter.default", (node.arg(1, "dim", 0), index)


def _diagonal(node: Node, index: int, shape: tuple[int, ...]) -> Undo:
    return "aten.diagonal_scatter.default", tuple(node.args[1:])


INVERSES: dict[str, Inverse] = {
    "view": _reshape, "reshape": _reshape, "_unsafe_view": _reshape, "flatten": _reshape, "unflatten": _reshape,
    "squeeze": _reshape, "unsqueeze": _reshape, "view_as": _reshape, "reshape_as": _reshape, "ravel": _reshape,
    "transpose": _same, "t": _same, "numpy_T": _same, "mT": _same, "swapaxes": _same, "swapdims": _same, "permute": _permute,
    "slice": _slice, "narrow": _narrow, "split": _split, "split_with_sizes": _split, "chunk": _split, "tensor_split": _split,
    "detach": _same, "view_as_real": _complex, "view_as_complex": _real,
    "select": _select, "unbind": _unbind, "diagonal": _diagonal,
}  # fmt: skip
