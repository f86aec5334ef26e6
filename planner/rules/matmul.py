"""Products of matrices. Every factor may be split: a shared one that is summed over leaves a pending sum.

    linear: b* k, n k, n -> b* n          addmm: n, m k, k n -> m n          bmm: b m k, b k n -> b m n
"""

from __future__ import annotations

import itertools
import re

from planner.rules.base import Call, Dims, Rule, dims_rule, make_rule, names, rule
from planner.rules.dims import aligned, numbered

PRODUCT = {"kind": "matmul", "flops_per_point": 2.0, "saves": ("in0", "in1")}


@rule("aten.linear.default")
def linear(call: Call) -> Rule:
    b = names("b", len(call.shape(0)) - 1)
    if len(call.specs) == 3:
        return make_rule(f"{b} k, n k, n -> {b} n", call, linear=({0, 1}, {2}), **PRODUCT)
    if len(call.shape(1)) == 1:
        return make_rule(f"{b} k, k -> {b or '.'}", call, linear=({0, 1},), **PRODUCT)
    return make_rule(f"{b} k, n k -> {b} n", call, linear=({0, 1},), **PRODUCT)


@rule("aten.mm.default")
def mm(call: Call) -> Rule:
    return make_rule("m k, k n -> m n", call, linear=({0, 1},), **PRODUCT)


@rule("aten.bmm.default")
def bmm(call: Call) -> Rule:
    return make_rule("b m k, b k n -> b m n", call, linear=({0, 1},), **PRODUCT)


@rule("aten.mv.default")
def mv(call: Call) -> Rule:
    return make_rule("m k, k -> m", call, linear=({0, 1},), **PRODUCT)


@rule("aten.dot.default", "aten.vdot.default")
def dot(call: Call) -> Rule:
    return make_rule("k, k -> .", call, linear=({0, 1},), **PRODUCT)


@rule("aten.outer.default", "aten.ger.default")
def outer(call: Call) -> Rule:
    return make_rule("m, n -> m n", call, linear=({0, 1},), flops_per_point=1.0, saves=("in0", "in1"))


@rule("aten.linalg_vecdot.default")
def vecdot(call: Call) -> Rule:
    shape = tuple(max(sizes) for sizes in itertools.zip_longest(*(reversed(spec.shape) for spec in call.specs), fillvalue=1))[::-1]
    dim = int(call.arg(2, "dim", -1)) % len(shape)
    inputs = [aligned(spec.shape, shape) for spec in call.specs]
    out = tuple(factors for i, factors in enumerate(numbered(shape)) if i != dim)
    return dims_rule(call, inputs, [out], linear=({0, 1},), flops_per_point=2.0, saves=("in0", "in1"))


# ---------------------------------------------------------------- with an added term (``beta`` and ``alpha`` keep it linear)


def added(call: Call, text: str) -> Rule:
    """``text`` holds the dims of the two factors and of the output; the added term broadcasts to the output."""
    left, right = text.split("->")
    out = right.split()
    term = call.shape(0)
    first = len(out) - len(term)
    dims = " ".join(out[first + i] if size != 1 else "1" for i, size in enumerate(term)) or "."
    return make_rule(f"{dims}, {left} -> {right}", call, linear=({1, 2}, {0}), kind="matmul", flops_per_point=2.0, saves=("in1", "in2"))


@rule("aten.addmm.default")
def addmm(call: Call) -> Rule:
    return added(call, "m k, k n -> m n")


@rule("aten.baddbmm.default")
def baddbmm(call: Call) -> Rule:
    return added(call, "b m k, b k n -> b m n")


@rule("aten.addbmm.default")
def addbmm(call: Call) -> Rule:
    return added(call, "b m k, b k n -> m n")


@rule("aten.addmv.default")
def addmv(call: Call) -> Rule:
    return added(call, "m k, k -> m")


@rule("aten.addr.default")
def addr(call: Call) -> Rule:
    return added(call, "m, n -> m n")


# ---------------------------------------------------------------- broadcasting


@rule("aten.matmul.default", "aten.linalg_matmul.default")
def matmul(call: Call) -> Rule:
    a, b = call.shape(0), call.shape(1)
    batch = call.out[: max(len(a) - 2, len(b) - 2, 0)]
    left: Dims = (("k",),) if len(a) == 1 else (*aligned(a[:-2], batch), ("m",), ("k",))
    right: Dims = (("k",),) if len(b) == 1 else (*aligned(b[:-2], batch), ("k",), ("n",))
    out: Dims = (*numbered(batch), *((("m",),) if len(a) > 1 else ()), *((("n",),) if len(b) > 1 else ()))
    return dims_rule(call, [left, right], [out], linear=({0, 1},), **PRODUCT)


@rule("aten.inner.default")
def inner(call: Call) -> Rule:
    a, b = names("a", len(call.shape(0)) - 1), names("b", len(call.shape(1)) - 1)
    return make_rule(f"{a} k, {b} k -> {f'{a} {b}'.strip() or '.'}", call, linear=({0, 1},), **PRODUCT)


@rule("aten.tensordot.default")
def tensordot(call: Call) -> Rule:
    dims = [[int(d) % len(call.shape(i)) for d in call.node.args[2 + i]] for i in (0, 1)]
    sides: list[Dims] = []
    for i, prefix in enumerate("ab"):
        sides.append(tuple((f"k{dims[i].index(d)}",) if d in dims[i] else (f"{prefix}{d}",) for d in range(len(call.shape(i)))))
    out = tuple(dim for side in sides for dim in side if not dim[0].startswith("k"))
    return dims_rule(call, sides, [out], linear=({0, 1},), **PRODUCT)


@rule("aten.bilinear.default")
def bilinear(call: Call) -> Rule:
    b = names("b", len(call.out) - 1)
    bias = len(call.specs) == 4
    text = f"{b} i, {b} j, n i j{', n' if bias else ''} -> {b} n"
    return make_rule(
        text, call, linear=({0, 1, 2}, {3})[: 1 + bias], kind="matmul", flops_per_point=2.0, saves=("in0", "in1", "in2")
    )


@rule("aten.cdist.default", "aten._cdist_forward.default")
def cdist(call: Call) -> Rule:
    a, b = call.shape(0), call.shape(1)
    batch = call.out[:-2]
    return dims_rule(
        call,
        [(*aligned(a[:-2], batch), ("m",), ("k",)), (*aligned(b[:-2], batch), ("n",), ("k",))],
        [(*numbered(batch), ("m",), ("n",))],
        whole={"k"}, sums=False, kind="matmul", flops_per_point=2.0, saves=("in0", "in1", "out0"),
    )  # fmt: skip


@rule("aten.einsum.default")
def einsum(call: Call) -> Rule | None:
    """Factors are the equation's own letters; an ellipsis stands for broadcast dims ``e0 e1 ...``, aligned on the right.

    No rule for a letter that one operand has twice (a diagonal).
    """
    parsed = parse_equation(str(call.arg(0, "equation")), [spec.shape for spec in call.specs], len(call.out))
    if parsed is None:
        return None
    terms, result = parsed
    operands = [tuple((name,) if n != 1 else () for name, n in zip(term, spec.shape, strict=True)) for term, spec in zip(terms, call.specs)]
    present = {dim[0] for dims in operands for dim in dims if dim}
    out = tuple((name,) if name in present else () for name in result)
    product = len(operands) > 1
    return dims_rule(
        call, operands, [out], linear=(set(range(len(operands))),),
        kind="matmul" if product and present - set(result) else "memory",
        flops_per_point=2.0 if product else 0.0, saves=tuple(f"in{i}" for i in range(len(operands))) if product else (),
    )  # fmt: skip


def parse_equation(equation: str, shapes: list[tuple[int, ...]], out_ndim: int) -> tuple[list[list[str]], list[str]] | None:
    """Letters of every operand and of the result, with the ellipsis written out; None where a letter repeats within one."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    letters = [re.sub(r"\.\.\.", "", part) for part in parts]
    hidden = max((len(shape) - len(own) for part, own, shape in zip(parts, letters, shapes) if "..." in part), default=0)
    if not arrow:
        joined = "".join(letters)
        right = ("..." if hidden else "") + "".join(sorted(letter for letter in set(joined) if joined.count(letter) == 1))
    terms = [_spell(part, len(shape) - len(own), hidden) for part, own, shape in zip(parts, letters, shapes)]
    if any(len(set(term)) != len(term) for term in terms):
        return None
    return terms, _spell(right, hidden, hidden)


def _spell(part: str, own: int, hidden: int) -> list[str]:
    before, dots, after = part.partition("...")
    return [*before, *(f"e{i}" for i in range(hidden - own, hidden) if dots), *after]
