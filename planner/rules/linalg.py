"""Decompositions and solvers: one matrix after another, so leading batch dims pass and the matrices stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.rules.base import Call, Dims, Rule, dims_rule, rule
from planner.rules.dims import aligned, numbered, words

# overload -> what autograd keeps of it; ops on one matrix [.., m, n]
ONE_MATRIX: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        words("""linalg_cholesky.default linalg_cholesky_ex.default cholesky.default linalg_inv.default linalg_inv_ex.default
        inverse.default"""), ("out0",),
    ),
    **dict.fromkeys(
        words("""linalg_det.default det.default linalg_slogdet.default slogdet.default logdet.default linalg_qr.default
        linalg_pinv.default linalg_pinv.atol_rtol_float pinverse.default linalg_eigh.default linalg_eigvalsh.default linalg_svd.default
        linalg_svdvals.default svd.default matrix_power.default linalg_matrix_power.default"""), ("in0",),
    ),
    "cholesky_inverse.default": ("in0", "out0"),
}  # fmt: skip
TWO_MATRICES = ("cholesky_solve", "linalg_solve_triangular", "triangular_solve")


@rule(*(f"aten.{name}" for name in ONE_MATRIX))
def one_matrix(call: Call) -> Rule:
    return _batched(call, [2], saves=ONE_MATRIX[call.node.op.removeprefix("aten.")])


@rule("aten.linalg_matrix_norm.default", "aten.linalg_matrix_norm.str_ord")
def matrix_norm(call: Call) -> Rule | None:
    """Of the last two dims, which is what is meant where no others are named."""
    dims = call.arg(2, "dim", (-2, -1))
    return _batched(call, [2], saves=("in0",)) if {int(d) % len(call.shape(0)) for d in dims} == _last_two(call) else None


def _last_two(call: Call) -> set[int]:
    n = len(call.shape(0))
    return {n - 2, n - 1}


@rule("aten.linalg_solve.default")
def solve(call: Call) -> Rule:
    """``A [.., n, n]``, ``B [.., n, k]`` or vectors ``[.., n]``. Linear in B."""
    a, b = call.shape(0), call.shape(1)
    vectors = len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1])
    return _batched(call, [2, 1 if vectors else 2], linear=({1},), saves=("in0", "out0"))


@rule(*(f"aten.{name}.default" for name in TWO_MATRICES))
def solve_with(call: Call) -> Rule:
    """``cholesky_solve(B, L)``, ``linalg_solve_triangular(A, B)``, ``triangular_solve(B, A) -> (X, copy of A)``."""
    linear = {"aten.cholesky_solve.default": ({0},), "aten.linalg_solve_triangular.default": ({1},)}.get(call.node.op, ())
    return _batched(call, [2, 2], linear=linear, saves=("in0", "in1", "out0"))


def _batched(call: Call, core: Sequence[int], **fields: Any) -> Rule:
    """``core``: how many dims of each input belong to one matrix or vector."""
    leading = [spec.shape[: len(spec.shape) - n] for spec, n in zip(call.specs, core, strict=True)]
    rank = max(map(len, leading))
    padded = [(1,) * (rank - len(shape)) + shape for shape in leading]
    batch = tuple(max(sizes) for sizes in zip(*padded))
    inputs: list[Dims] = []
    whole: set[str] = set()

    def matrix(label: str, count: int) -> Dims:
        dims = tuple((f"{label}{i}",) for i in range(count))
        whole.update(dim[0] for dim in dims)
        return dims

    for k, (shape, n) in enumerate(zip(leading, core)):
        inputs.append((*aligned(shape, batch), *matrix(f"i{k}_", n)))
    outputs = [(*numbered(batch), *matrix(f"o{k}_", len(spec.shape) - rank)) for k, spec in enumerate(call.node.outputs)]
    return dims_rule(call, inputs, outputs, whole=whole, **fields)
