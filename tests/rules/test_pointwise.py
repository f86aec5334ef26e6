"""Pointwise ops against the law: all of the table, broadcasting, dtypes, and the forms in which they are linear."""

import pytest
import torch
from law import SAMPLES, bools, check, draw, f, fixed, ints, kept_elements, ops_here, samples, told_elements

from planner.rules.base import one_axis
from planner.rules.dims import words
from planner.rules.pointwise import POINTWISE, SAVES, UNARY

BEFORE = set(SAMPLES)

# legend: 8 splits evenly over 2 and 4 ranks, unevenly over 3; 7 unevenly over all
SHAPE = (8, 7)


def positive(x):
    return x.abs() + 0.3


def above_one(x):
    return x.abs() + 1.2


def unit(x):
    return torch.tanh(x) * 0.9


def probability(x):
    return torch.sigmoid(x) * 0.9 + 0.05


DOMAINS = {
    **dict.fromkeys(words("acosh arccosh"), above_one),
    **dict.fromkeys(words("acos arccos asin arcsin atanh arctanh erfinv"), unit),
    **dict.fromkeys(words("digamma lgamma log log10 log2 log1p reciprocal rsqrt sqrt polygamma special_entr special_log_ndtr"), positive),
    **dict.fromkeys(words("logit special_logit special_ndtri"), probability),
    **dict.fromkeys(words("special_digamma special_gammaln special_log1p special_psi"), positive),
    "special_erfinv": unit,
    "mvlgamma": lambda x: x.abs() + 3.0,
}
FURTHER = {
    "clamp": (-0.5, 0.5), "clip": (None, 0.5), "clamp_max": (0.5,), "clamp_min": (0.0,), "threshold": (0.1, -2.0), "mvlgamma": (2,),
    "hardtanh": (-0.5, 0.5), "gelu": (), "elu": (0.7,), "leaky_relu": (0.2,), "softplus": (2.0, 20.0), "logit": (1e-3,),
    "special_logit": (1e-3,), "softshrink": (0.3,),
}  # fmt: skip
INTEGER = ("bitwise_not",)
for _name in UNARY.split():
    _op = f"aten.{_name}.default"
    if _name in INTEGER:
        samples(_op, (ints(*SHAPE),), (bools(*SHAPE),))
    elif _name in ("polygamma", "special_polygamma"):
        samples(_op, (1, f(*SHAPE, make=positive)))
    else:
        samples(_op, (f(*SHAPE, make=DOMAINS.get(_name)), *FURTHER.get(_name, ())))
samples("aten.gelu.default", (f(8, 7),), approximate="tanh")
samples("aten.clone.default", (ints(8, 7),), memory_format=None)

# ---------------------------------------------------------------- two tensors: equal shapes, broadcast rows, columns and ranks

PAIRS = [((8, 7), (8, 7)), ((8, 7), (7,)), ((8, 1), (1, 7)), ((7,), (6, 8, 7)), ((8, 7), ())]


def pairs(op, make=None, shapes=PAIRS, mesh=False, **kwargs):
    samples(op, *((f(*a), f(*b, make=make)) for a, b in shapes), mesh=mesh, **kwargs)


for _op in words("add sub subtract rsub"):
    pairs(f"aten.{_op}.Tensor", mesh=_op == "add")
pairs("aten.add.Tensor", shapes=PAIRS[:2], alpha=2.5)
pairs("aten.sub.Tensor", shapes=PAIRS[:2], alpha=0.5)
pairs("aten.mul.Tensor", mesh=True)
pairs("aten.multiply.Tensor")
for _op in words("div divide true_divide"):
    pairs(f"aten.{_op}.Tensor", positive)
for _op in words("maximum minimum fmax fmin logaddexp logaddexp2 hypot atan2 arctan2 special_xlog1py special_xlogy"):
    pairs(f"aten.{_op}.default", positive)
for _op in words("nextafter heaviside isclose"):
    samples(f"aten.{_op}.default", (fixed(8, 7), fixed(7)))
for _op in words("igamma igammac special_gammainc special_gammaincc"):
    samples(f"aten.{_op}.default", (fixed(8, 7, make=positive), f(7, make=positive)))
for _op in words("gcd lcm"):
    samples(f"aten.{_op}.default", (ints(8, 7), ints(7, low=1)))
samples("aten.special_zeta.default", (fixed(8, 7, make=above_one), fixed(7, make=positive)))
for _op in words("special_xlogy special_xlog1py"):
    samples(f"aten.{_op}.other_scalar", (f(8, 7), 2.0))
    samples(f"aten.{_op}.self_scalar", (2.0, f(8, 7, make=positive)))
samples("aten.special_zeta.other_scalar", (fixed(8, 7, make=above_one), 2.0))
samples("aten.special_zeta.self_scalar", (2.0, fixed(8, 7, make=positive)))
for _op in ("max.other", "min.other", "copysign.Tensor", "xlogy.Tensor", "remainder.Tensor", "fmod.Tensor", "ldexp.Tensor"):
    pairs(f"aten.{_op}", positive, PAIRS[:3])
for _op in ("pow.Tensor_Tensor", "float_power.Tensor_Tensor"):
    samples(f"aten.{_op}", (f(8, 7, make=positive), f(7)), (f(8, 1, make=positive), f(7)))
for _op in ("div.Tensor_mode", "divide.Tensor_mode"):
    samples(f"aten.{_op}", (f(8, 7), f(7, make=positive)), rounding_mode="floor")
    samples(f"aten.{_op}", (ints(8, 7), ints(7, low=1)), rounding_mode="trunc")
samples("aten.floor_divide.default", (ints(8, 7), ints(7, low=1)), (ints(8, 7), 3))
samples("aten.logical_and.default", (bools(8, 7), bools(7)), (fixed(8, 7), ints(7)))
samples("aten.logical_or.default", (bools(8, 7), bools(7)))
samples("aten.logical_xor.default", (bools(8, 7), bools(7)))
for _op in words("eq ne lt le gt ge not_equal less less_equal greater greater_equal"):
    samples(f"aten.{_op}.Tensor", (ints(8, 7), ints(7)), (f(8, 7), f(8, 1)))
    samples(f"aten.{_op}.Scalar", (ints(8, 7), 0), (f(8, 7), 0.5))
for _op in words("bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__"):
    samples(f"aten.{_op}.Tensor", (ints(8, 7), ints(7)), (bools(8, 7), bools(8, 1)))
    samples(f"aten.{_op}.Scalar", (ints(8, 7), 3), (bools(8, 7), True))
for _op in ("left", "right"):
    samples(f"aten.bitwise_{_op}_shift.Tensor", (ints(8, 7, low=0), ints(7, low=0, high=4)))
    samples(f"aten.bitwise_{_op}_shift.Tensor_Scalar", (ints(8, 7, low=0), 2))
    samples(f"aten.bitwise_{_op}_shift.Scalar_Tensor", (5, ints(8, 7, low=0, high=4)))
    samples(f"aten.__{_op[0]}shift__.Tensor", (ints(8, 7, low=0), ints(7, low=0, high=4)))
    samples(f"aten.__{_op[0]}shift__.Scalar", (ints(8, 7, low=0), 2))
for _op in ("bitwise_and", "bitwise_or", "bitwise_xor", "remainder"):
    samples(f"aten.{_op}.Scalar_Tensor", (5, ints(8, 7, low=1)))
samples("aten.isin.Tensor_Scalar", (ints(8, 7), 3))

# ---------------------------------------------------------------- with a scalar

for _op in words("add sub subtract mul multiply div divide true_divide rsub remainder fmod copysign"):
    samples(f"aten.{_op}.Scalar", (f(8, 7), 2.5))
for _op in words("add sub mul div multiply"):
    samples(f"aten.{_op}.Tensor", (f(8, 7), 1.5))
samples("aten.add.Tensor", (f(8, 7), 0))
samples("aten.pow.Tensor_Scalar", (f(8, 7), 3), (f(8, 7), 2))
samples("aten.pow.Scalar", (2.0, f(8, 7)))
samples("aten.float_power.Tensor_Scalar", (f(8, 7), 3))
samples("aten.float_power.Scalar", (2.0, f(8, 7)))
samples("aten.floor_divide.Scalar", (ints(8, 7), 3))
samples("aten.div.Scalar_mode", (f(8, 7), 0.7), rounding_mode="trunc")
samples("aten.divide.Scalar_mode", (f(8, 7), 0.7), rounding_mode="floor")
samples("aten.xlogy.Scalar_Other", (f(8, 7), 2.0))
samples("aten.xlogy.Scalar_Self", (2.0, f(8, 7, make=positive)))
samples("aten.round.decimals", (f(8, 7),), decimals=1)

# ---------------------------------------------------------------- three tensors, masks, limits

samples("aten.addcmul.default", (f(8, 7), f(8, 7), f(7)), (f(7), f(8, 1), f(8, 7)), value=0.5)
samples("aten.addcdiv.default", (f(8, 7), f(8, 7), f(7, make=positive)), value=0.5)
samples("aten.lerp.Scalar", (f(8, 7), f(8, 7), 0.3), (f(7), f(8, 1), 0.8))
samples("aten.lerp.Tensor", (f(8, 7), f(7), f(8, 1, make=probability)))
samples("aten.where.self", (bools(8, 7), f(8, 7), f(7)), (bools(8, 1), f(7), f()), mesh=True)
samples("aten.where.ScalarOther", (bools(8, 7), f(7), 0), (bools(8, 7), f(7), -1e9))
samples("aten.where.ScalarSelf", (bools(8, 7), 0.0, f(8, 1)), (bools(8, 7), 1.0, f(8, 7)))
samples("aten.where.Scalar", (bools(8, 7), 1.0, 0.0))
samples("aten.masked_fill.Scalar", (f(8, 7), bools(7), 0), (f(8, 7), bools(8, 1), float("-inf")), mesh=True)
samples("aten.masked_fill.Tensor", (f(8, 7), bools(7), f()))
samples("aten.clamp.Tensor", (f(8, 7), fixed(7, make=lambda x: -positive(x)), fixed(8, 1, make=positive)), (f(8, 7), None, f(7)))
samples("aten.clip.Tensor", (f(8, 7), fixed(7)))
samples("aten.clamp_min.Tensor", (f(8, 7), f(7)))
samples("aten.clamp_max.Tensor", (f(8, 7), f(8, 1)))
samples("aten.fill.Scalar", (f(8, 7), 2.0))
samples("aten.fill.Tensor", (f(8, 7), f()))

# ---------------------------------------------------------------- casts and values that are not read

for _to in (torch.float32, torch.float64, torch.int64):
    samples("aten.to.dtype", (f(8, 7), _to))
    samples("aten._to_copy.default", (f(8, 7),), dtype=_to)
samples("aten.to.dtype", (ints(8, 7), torch.float64), (bools(8, 7), torch.float64), (ints(8, 7), torch.bool))
samples("aten.to.dtype_layout", (f(8, 7),), dtype=torch.float32)
samples("aten.to.device", (f(8, 7), torch.device("cpu"), torch.float32))
samples("aten.to.prim_Device", (f(8, 7), torch.device("cpu")))
samples("aten.to.prim_dtype", (f(8, 7), torch.float32))
samples("aten.type_as.default", (f(8, 7), ints(6)), (ints(8, 7), f(8, 7)))
samples("aten.to.other", (f(8, 7), fixed(6, dtype=torch.float32)))
for _op in ("zeros_like", "ones_like"):
    samples(f"aten.{_op}.default", (f(8, 7),), (ints(8, 7),))
samples("aten.full_like.default", (f(8, 7), 3.5))
samples("aten.empty_like.default", (f(8, 7),), values=False)

# ---------------------------------------------------------------- along one dim, apart

samples("aten.prelu.default", (f(8, 7, 4), f(7)), (f(8, 7), f(1)), mesh=True)
samples("aten.glu.default", (f(8, 6, 7), 1), (f(7, 8),))

OPS = ops_here(BEFORE)


@pytest.mark.parametrize("op", OPS)
def test_law(op):
    check(op)


@pytest.mark.parametrize("op", OPS)
def test_keeps_what_autograd_keeps(op):
    assert kept_elements(op) == told_elements(op)


def test_a_scalar_added_carries_no_pending_sum():
    for op, linear in (("aten.add.Scalar", False), ("aten.mul.Scalar", True)):
        case = draw(SAMPLES[op][0])
        texts = {str(s) for s in one_axis(case.rule, (True,), (True,), 2)}
        assert ("P -> P" in texts) == linear


def test_tables_name_known_ops():
    known = {op.split(".")[1] for op in POINTWISE} | {op.removeprefix("aten.") for op in POINTWISE} | {"prelu"}
    assert set(SAVES) <= known
