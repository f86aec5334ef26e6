"""Ops that make each output element from the elements at the same place: every factor passes through.

Factors are the output's dims ``d0 d1 ...``; a dim of size 1 that broadcasts has none. The tables say what differs from op to op: the
terms it is linear in, and what autograd keeps. A scalar added or subtracted is a constant, so ``x + 1`` carries no pending sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from planner.graph import Value
from planner.rules.base import Call, Rule, Strategy, dims_rule, rule
from planner.rules.dims import aligned, numbered, through, words
from planner.sharding import P, R

Terms = tuple[tuple[int, ...], ...]

# Sums of terms, each multilinear in these arguments; a scalar factor drops out of its term, a scalar term makes the op non-linear.
LINEAR: dict[str, Terms] = {
    "aten.add.Tensor": ((0,), (1,)),
    "aten.sub.Tensor": ((0,), (1,)),
    "aten.subtract.Tensor": ((0,), (1,)),
    "aten.rsub.Tensor": ((0,), (1,)),
    "aten.mul.Tensor": ((0, 1),),
    "aten.mul.Scalar": ((0,),),
    "aten.multiply.Tensor": ((0, 1),),
    "aten.multiply.Scalar": ((0,),),
    "aten.div.Tensor": ((0,),),
    "aten.div.Scalar": ((0,),),
    "aten.divide.Tensor": ((0,),),
    "aten.divide.Scalar": ((0,),),
    "aten.true_divide.Tensor": ((0,),),
    "aten.true_divide.Scalar": ((0,),),
    "aten.neg.default": ((0,),),
    "aten.negative.default": ((0,),),
    "aten.clone.default": ((0,),),
    "aten.contiguous.default": ((0,),),
    "aten.lift_fresh_copy.default": ((0,),),
    "aten.deg2rad.default": ((0,),),
    "aten.rad2deg.default": ((0,),),
    "aten.addcmul.default": ((0,), (1, 2)),
    "aten.addcdiv.default": ((0,), (1,)),
    "aten.lerp.Scalar": ((0,), (1,)),
    "aten.lerp.Tensor": ((0,), (1,)),
    "aten.where.self": ((1,), (2,)),
    "aten.masked_fill.Tensor": ((0,), (2,)),
    "aten.fill.Tensor": ((1,),),
}

# What autograd keeps, for the ops that keep anything: by op, or by overload where they differ.
SAVES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(words("relu exp exp2 expm1 sigmoid tanh sqrt rsqrt reciprocal tan sinh special_exp2 special_expm1"), ("out0",)),
    **dict.fromkeys(
        words("""abs absolute acos acosh asin asinh atan atanh arccos arccosh arcsin arcsinh arctan arctanh angle celu clamp clamp_max
        clamp_min clip cos cosh digamma elu erf erfc erfinv gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu lgamma log
        log10 log1p log2 logit mish nan_to_num relu6 selu silu sin sinc softplus softshrink special_expit square
        threshold i0 special_ndtri special_entr mvlgamma polygamma special_digamma special_psi special_erf special_erfc special_erfinv
        special_gammaln special_i0 special_log1p special_logit special_ndtr special_polygamma special_sinc"""),
        ("in0",),
    ),
    **dict.fromkeys(
        words("""mul multiply div divide true_divide pow atan2 arctan2 maximum minimum max min fmax fmin logaddexp logaddexp2
        copysign float_power remainder fmod special_xlog1py special_xlogy igamma igammac special_gammainc
        special_gammaincc"""), ("in0", "in1"),
    ),
    "addcmul": ("in1", "in2"),
    "addcdiv": ("in1", "in2"),
    **dict.fromkeys(
        words("log_sigmoid sgn special_erfcx special_i0e special_i1 special_i1e special_log_ndtr copysign.Scalar"), ("in0", "out0")
    ),
    **dict.fromkeys(words("hypot pow.Tensor_Tensor float_power.Tensor_Tensor"), ("in0", "in1", "out0")),
    **dict.fromkeys(words("pow.Scalar float_power.Scalar"), ("in0", "out0")),
    **dict.fromkeys(words("xlogy.Tensor clamp_min.Tensor clamp_max.Tensor"), ("in0", "in1")),
    **dict.fromkeys(words("clamp.Tensor clip.Tensor"), ("in0", "in1", "in2")),
    "xlogy": ("in0",),
    "lerp.Tensor": ("in0", "in1", "in2"),
    "where": ("in0",),
    "ldexp": ("in0", "in1"),
    "masked_fill": ("in1",),
    "prelu": ("in0", "in1"),
}  # fmt: skip

UNARY = """abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh angle bitwise_not ceil celu
clamp clamp_max clamp_min clip clone contiguous cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 fix floor frac gelu
hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf leaky_relu lgamma lift_fresh_copy log log10 log1p
log2 log_sigmoid logical_not logit mish nan_to_num neg negative polygamma mvlgamma rad2deg reciprocal relu relu6 round rsqrt selu sgn
sigmoid sign signbit silu sin sinc sinh softplus softshrink special_entr special_erfcx special_expit special_i0e special_i1
special_log_ndtr special_ndtri sqrt square tan tanh threshold trunc isreal special_digamma special_erf special_erfc special_erfinv
special_exp2 special_expm1 special_gammaln special_i0 special_i1e special_log1p special_logit special_ndtr special_polygamma special_psi
special_round special_sinc"""

# overloads -> the ops that have them
FORMS: dict[str, str] = {
    "default": UNARY + """ logical_and logical_or logical_xor maximum minimum fmax fmin atan2 arctan2 hypot logaddexp logaddexp2 nextafter
        heaviside floor_divide addcmul addcdiv isclose gcd lcm igamma igammac special_gammainc special_gammaincc special_xlog1py
        special_xlogy special_zeta""",
    "Tensor Scalar": """add sub subtract mul multiply div divide true_divide rsub eq ne lt le gt ge not_equal less less_equal greater
        greater_equal bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __lshift__ __rshift__ remainder fmod copysign fill lerp
        masked_fill""",
    "Tensor": "clamp clamp_min clamp_max clip ldexp xlogy",
    "Scalar": "floor_divide where",
    "Tensor Tensor_Scalar": "bitwise_left_shift bitwise_right_shift",
    "Scalar_Tensor": "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift remainder",
    "Tensor_Scalar": "isin",
    "Tensor_mode Scalar_mode": "div divide",
    "Tensor_Scalar Tensor_Tensor Scalar": "pow float_power",
    "Scalar_Other Scalar_Self": "xlogy",
    "other_scalar self_scalar": "special_xlogy special_xlog1py special_zeta",
    "self ScalarOther ScalarSelf": "where",
    "other": "max min",
    "decimals": "round",
}  # fmt: skip
POINTWISE = [f"aten.{name}.{form}" for forms, names in FORMS.items() for name in words(names) for form in words(forms)]


@rule(*POINTWISE)
def pointwise(call: Call) -> Rule:
    out = numbered(call.out)
    return dims_rule(
        call,
        [aligned(spec.shape, call.out) for spec in call.specs],
        [out] * len(call.node.outputs),
        linear=linear_terms(call, _terms(call)),
        flops_per_point=float(call.node.outputs[0].is_float),
        saves=_saves(call),
    )


def _terms(call: Call) -> Terms:
    """Those of the table, and the scalar forms that keep nothing but zeros beside the tensor."""
    if call.node.op == "aten.masked_fill.Scalar" and call.arg(2, "value") == 0:
        return ((0,),)
    if call.node.op == "aten.where.ScalarOther" and call.arg(2, "other") == 0:
        return ((1,),)
    if call.node.op == "aten.where.ScalarSelf" and call.arg(1, "self") == 0:
        return ((2,),)
    if call.node.op in ("aten.add.Tensor", "aten.sub.Tensor") and not isinstance(call.node.args[1], Value) and call.node.args[1] == 0:
        return ((0,),)
    return LINEAR.get(call.node.op, ())


def linear_terms(call: Call, terms: Terms) -> tuple[set[int], ...]:
    """Terms over argument positions -> terms over tensor inputs; () where a term has no tensor, or booleans are involved.

    Booleans do not add up: ``True + True`` is ``True``; and an integer result of a division is not linear.
    """
    if any(spec.dtype == "bool" for spec in call.node.outputs):
        return ()
    position: dict[int, int] = {}
    for index, arg in enumerate(call.node.args):
        if isinstance(arg, Value):
            position[index] = len(position)
    result = []
    for term in terms:
        inputs = {position[i] for i in term if i in position and call.specs[position[i]].dtype != "bool"}
        if not inputs:
            return ()
        result.append(inputs)
    return tuple(result)


def _saves(call: Call) -> tuple[str, ...]:
    """What the table says, of the inputs that are there; a product with a scalar keeps nothing."""
    if not call.node.outputs[0].is_float:
        return ()
    _, name, form = call.node.op.split(".")
    found = SAVES.get(f"{name}.{form}", SAVES.get(name, ()))
    if len(call.specs) == 1 and name in ("mul", "multiply", "div", "divide", "true_divide", "remainder", "fmod"):
        found = ()
    return tuple(s for s in found if s.startswith("out") or int(s[2:]) < len(call.specs))


# ---------------------------------------------------------------- casts

CASTS = words("to.dtype to.device to.dtype_layout to.prim_Device to.prim_dtype _to_copy.default")


@rule(*(f"aten.{name}" for name in CASTS))
def cast(call: Call) -> Rule:
    return through(call, range(len(call.out)), **_cast_fields(call))


@rule("aten.type_as.default", "aten.to.other")
def cast_like(call: Call) -> Rule:
    """Only the dtype of the second tensor is read."""
    return dims_rule(call, [numbered(call.out), numbered(call.shape(1), "e")], [numbered(call.out)], ignored=frozenset({1}), sums=False,
                     whole=_names(numbered(call.shape(1), "e")), **_cast_fields(call))  # fmt: skip


def _names(dims: Iterable[tuple[str, ...]]) -> set[str]:
    return {factor for dim in dims for factor in dim}


def _cast_fields(call: Call) -> dict[str, Any]:
    before, after = call.specs[0], call.node.outputs[0]
    copies = before.dtype != after.dtype or call.node.op == "aten._to_copy.default"
    linear = (after.is_float and before.dtype != "bool") or before.dtype == after.dtype != "bool"
    return {"linear": ({0},) if linear else (), "kind": "memory" if copies else "view"}


# ---------------------------------------------------------------- values that are not read

NOT_READ = ("zeros_like", "ones_like", "full_like", "empty_like")


@rule(*(f"aten.{name}.default" for name in NOT_READ))
def made_like(call: Call) -> Rule:
    """Only the shape is read: a pending sum will do as well."""
    dims = numbered(call.out)
    return dims_rule(call, [dims], [dims], extra=(Strategy((P,), (R,)),))


# ---------------------------------------------------------------- along one dim, apart


@rule("aten.prelu.default")
def prelu(call: Call) -> Rule:
    """The weight is one number, or one per channel (dim 1)."""
    x = numbered(call.out)
    weight = (x[1],) if call.shape(1)[0] != 1 else ((),)
    return dims_rule(call, [x, weight], [x], flops_per_point=1.0, saves=("in0", "in1"))


@rule("aten.glu.default")
def glu(call: Call) -> Rule:
    n = len(call.out)
    dim = int(call.arg(1, "dim", -1)) % n
    return through(call, [None if i == dim else i for i in range(n)], flops_per_point=0.0, saves=("in0",))
