"""Pooling, resizing and resampling. Legend: b batch and channels, i input space, y output space; only b splits."""

from __future__ import annotations

from planner.rules.arguments import Arguments, lead, text
from planner.rules.base import Call, Rule, rule

_SPACES = (1, 2, 3)


def _spatial(call: Call, space: int, linear: bool, saves: tuple[str, ...] = (), index_bytes: float = 0.0) -> Rule:
    args = Arguments(call, "input")
    b = lead("b", len(args.shape("input")) - space)
    i, y = lead("i", space), lead("y", space)
    out = text(b, y)
    return args.rule(
        {"input": text(b, i)},
        ", ".join([out] * len(call.node.outputs)),
        linear=("input",) if linear and len(call.node.outputs) == 1 else (),
        whole=[*i, *y],
        saves=saves,
        flops_per_point=1.0,
        extra_saved_bytes_per_point=index_bytes,
    )


def _space_of(call: Call) -> int:
    """Spatial dims, from the op's name: ``max_pool2d``."""
    name = call.node.op.split(".")[1]
    return next((space for space in _SPACES if f"{space}d" in name), 2)


@rule(*(f"aten.avg_pool{n}d.default" for n in _SPACES), *(f"aten.adaptive_avg_pool{n}d.default" for n in _SPACES),
      *(f"aten._adaptive_avg_pool{n}d.default" for n in (2, 3)))  # fmt: skip
def average_pool(call: Call) -> Rule:
    return _spatial(call, _space_of(call), linear=True, saves=("input",))


@rule(*(f"aten.max_pool{n}d.default" for n in _SPACES))
def max_pool(call: Call) -> Rule:
    """Autograd keeps the place of every maximum, an int64 per output element."""
    return _spatial(call, _space_of(call), linear=False, saves=("input",), index_bytes=8.0)


@rule(*(f"aten.max_pool{n}d_with_indices.default" for n in (2, 3)), "aten.max_pool1d_with_indices.default",
      *(f"aten.adaptive_max_pool{n}d.default" for n in _SPACES))  # fmt: skip
def max_pool_with_indices(call: Call) -> Rule:
    return _spatial(call, _space_of(call), linear=False, saves=("input", "out1"))


_RESIZES = [
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d",
    "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
]  # fmt: skip


@rule(*(f"aten.{name}.{form}" for name in _RESIZES for form in ("default", "vec")))
def resize(call: Call) -> Rule:
    return _spatial(call, _space_of(call), linear=True)


@rule("aten.pixel_shuffle.default")
def pixel_shuffle(call: Call) -> Rule:
    """``pixel_shuffle(input [*, C * r * r, H, W], r) -> [*, C, H * r, W * r]``."""
    args = Arguments(call, "input")
    r = int(call.arg(1, "upscale_factor"))
    b = lead("b", len(call.out) - 3)
    sizes = {"c": call.out[-3], "p": r, "q": r, "h": call.out[-2] // r, "w": call.out[-1] // r}
    return args.rule(
        {"input": text(b, "(c p q)", "h", "w")}, text(b, "c", "(h p)", "(w q)"), linear=("input",), sizes=sizes, whole=["p", "q"]
    )


@rule("aten.pixel_unshuffle.default")
def pixel_unshuffle(call: Call) -> Rule:
    """``pixel_unshuffle(input [*, C, H * r, W * r], r) -> [*, C * r * r, H, W]``."""
    args = Arguments(call, "input")
    r = int(call.arg(1, "downscale_factor"))
    b = lead("b", len(call.out) - 3)
    sizes = {"c": args.shape("input")[-3], "p": r, "q": r, "h": call.out[-2], "w": call.out[-1]}
    return args.rule(
        {"input": text(b, "c", "(h p)", "(w q)")}, text(b, "(c p q)", "h", "w"), linear=("input",), sizes=sizes, whole=["p", "q"]
    )


@rule("aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(call: Call) -> Rule:
    """``grid_sampler(input [N, C, *in], grid [N, *out, space], ...) -> [N, C, *out]``: any part of the grid samples on its own."""
    args = Arguments(call, "input grid")
    space = args.shape("grid")[-1]
    i, y = lead("i", space), lead("y", space)
    dims = {"input": text("n", "c", i), "grid": text("n", y, "xyz")}
    return args.rule(dims, text("n", "c", y), linear=("input",), whole=[*i, "xyz"], saves=("input", "grid"), flops_per_point=1.0)


@rule("aten.affine_grid_generator.default")
def affine_grid(call: Call) -> Rule:
    """``affine_grid_generator(theta [N, space, space + 1], size) -> [N, *size, space]``: size is ``[N, C, *size]``, C is not used."""
    args = Arguments(call, "theta")
    y = lead("y", len(call.out) - 2)
    size = call.arg(1, "size")
    local = ((1, f"[n {size[1]} {' '.join(map(str, size[2:]))}]"),)
    return args.rule({"theta": "n p q"}, text("n", y, "p"), linear=("theta",), whole=["p", "q", *y], local_args=local)
