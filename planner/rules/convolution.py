"""Convolutions. Legend: n batch, g groups, c input channels per group, o output channels per group, i input space, k window, y output
space."""

from __future__ import annotations

import math

from planner.rules.arguments import Arguments, lead, text
from planner.rules.base import Call, Rule, rule

FORWARD = "input weight bias stride padding dilation groups"
TRANSPOSED = "input weight bias stride padding output_padding groups dilation"


@rule(
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv1d.padding", "aten.conv2d.padding", "aten.conv3d.padding"
)
def convolution(call: Call) -> Rule:
    """``conv2d(input [N, C, *], weight [O, C / groups, *], bias [O], ...)``, input also without a batch."""
    return _convolution(call, FORWARD, transposed=False)


@rule("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input")
def transposed_convolution(call: Call) -> Rule:
    """``conv_transpose2d(input [N, C, *], weight [C, O / groups, *], bias [O], ...)``."""
    return _convolution(call, TRANSPOSED, transposed=True)


@rule("aten.convolution.default", "aten._convolution.default")
def general_convolution(call: Call) -> Rule:
    """``convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``."""
    schema = "input weight bias stride padding dilation transposed output_padding groups"
    return _convolution(call, schema, transposed=bool(call.arg(6, "transposed")))


def _convolution(call: Call, schema: str, transposed: bool) -> Rule:
    args = Arguments(call, schema)
    position = schema.split().index("groups")
    groups = int(call.arg(position, "groups", 1))
    shape, weight = args.shape("input"), args.shape("weight")
    space = len(weight) - 2
    batch = ["n"] if len(shape) == space + 2 else []
    i, k, y = lead("i", space), lead("k", space), lead("y", space)
    c, o = ("(g c)", "(g o)") if groups > 1 else ("c", "o")
    # the window's dims: [O, C/g, *], transposed [C, O/g, *]
    kernel = text(c, "o", k) if transposed else text(o, "c", k)
    return args.rule(
        {"input": text(batch, c, i), "weight": kernel, "bias": o},
        text(batch, o, y),
        linear=("input weight", "bias"),
        sizes={"g": groups, "c": shape[-space - 1] // groups, "o": call.out[-space - 1] // groups} if groups > 1 else {},
        whole=[*i, *k, *y],
        saves=("input", "weight"),
        kind="conv",
        # every output (of a transposed convolution: input) element sums over the window: undo the space that does not take part
        flops_per_point=2.0 / math.prod(call.out[-space:] if transposed else shape[-space:]),
        local_args=((position, "g"),) if groups > 1 and position < len(call.node.args) else (),
    )


@rule("aten.im2col.default")
def im2col(call: Call) -> Rule:
    """``im2col(input [N, C, H, W], kernel_size, ...) -> [N, C * windows, positions]``."""
    args = Arguments(call, "input")
    shape = args.shape("input")
    batch = ["n"] if len(shape) == 4 else []
    sizes = {"c": shape[-3], "k": call.out[-2] // shape[-3]}
    return args.rule(
        {"input": text(batch, "c", "i0", "i1")}, text(batch, "(c k)", "y"), linear=("input",), sizes=sizes, whole=["i0", "i1", "k", "y"]
    )


@rule("aten.col2im.default")
def col2im(call: Call) -> Rule:
    """``col2im(input [N, C * windows, positions], output_size, kernel_size, ...) -> [N, C, H, W]``."""
    args = Arguments(call, "input")
    shape = args.shape("input")
    batch = ["n"] if len(shape) == 3 else []
    sizes = {"c": call.out[-3], "k": shape[-2] // call.out[-3]}
    return args.rule(
        {"input": text(batch, "(c k)", "y")}, text(batch, "c", "i0", "i1"), linear=("input",), sizes=sizes, whole=["i0", "i1", "k", "y"]
    )
