"""Complex numbers and Fourier transforms. Legend: d0, d1, ... dims; a transform's dims are whole (f in, o out)."""

from __future__ import annotations

import math

from planner.rules.arguments import Arguments, broadcast, broadcast_shape, lead, text
from planner.rules.base import Call, Rule, rule


@rule("aten.view_as_real.default")
def view_as_real(call: Call) -> Rule:
    d = lead("d", len(call.shape(0)))
    return Arguments(call, "self").rule({"self": text(d)}, text(d, "c"), linear=("self",), whole=["c"], kind="view")


@rule("aten.view_as_complex.default")
def view_as_complex(call: Call) -> Rule:
    d = lead("d", len(call.out))
    return Arguments(call, "self").rule({"self": text(d, "c")}, text(d), linear=("self",), whole=["c"], kind="view")


@rule("aten.real.default", "aten.imag.default", "aten.conj.default", "aten._conj.default", "aten.conj_physical.default")
def parts_of_complex(call: Call) -> Rule:
    """Linear over the real numbers, which is what a pending sum needs."""
    d = lead("d", len(call.out))
    kind = "memory" if call.node.op == "aten.conj_physical.default" else "view"
    return Arguments(call, "self").rule({"self": text(d)}, text(d), linear=("self",), kind=kind)


@rule("aten.complex.default")
def complex_(call: Call) -> Rule:
    """``complex(real, imag)``: a sum of two terms."""
    return _pair(call, "real imag", ("real", "imag"))


@rule("aten.polar.default")
def polar(call: Call) -> Rule:
    """``polar(abs, angle)``: linear in abs as a formula, but torch's gradient holds for abs >= 0 only, which pending sums are not."""
    return _pair(call, "abs angle", ())


def _pair(call: Call, schema: str, linear: tuple[str, ...]) -> Rule:
    args = Arguments(call, schema)
    shape = broadcast_shape(*(spec.shape for spec in call.specs))
    d = lead("d", len(shape))
    dims = {name: broadcast(args.shape(name), d, shape) for name in args.names}
    return args.rule(dims, text(d), linear=linear, saves=tuple(args.names) if linear else ("out0",), flops_per_point=2.0)


_ONE = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
_MANY = ("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2")


@rule(*(f"aten.{name}.default" for name in _ONE))
def transform(call: Call) -> Rule:
    """``fft(self, n, dim, norm)``."""
    return _transform(call, {int(call.arg(2, "dim", -1)) % len(call.shape(0))})


@rule(*(f"aten.{name}.default" for name in _MANY))
def transforms(call: Call) -> Rule:
    """``fftn(self, s, dim, norm)``: over the last dims that ``s`` names, or all, where ``dim`` is not given."""
    rank = len(call.shape(0))
    lengths, over = call.arg(1, "s"), call.arg(2, "dim", (-2, -1) if "2" in call.node.op else None)
    if over is None:
        over = range(rank - len(lengths), rank) if lengths else range(rank)
    return _transform(call, {int(dim) % rank for dim in ((over,) if isinstance(over, int) else over)})


def _transform(call: Call, over: set[int]) -> Rule:
    rank = len(call.out)
    before = [f"f{i}" if i in over else f"d{i}" for i in range(rank)]
    after = [f"o{i}" if i in over else f"d{i}" for i in range(rank)]
    points = math.prod(call.out[i] for i in over)
    return Arguments(call, "self").rule(
        {"self": text(before)},
        text(after),
        linear=("self",),
        whole=[name for name in before + after if name[0] != "d"],
        # autograd keeps a real input to know its length
        saves=() if call.specs[0].dtype.startswith("complex") else ("self",),
        # 5 N log2 N for a transform of N points, per point of the factors
        flops_per_point=5.0 * math.log2(max(2, points)) / math.prod(call.shape(0)[i] for i in over),
    )


@rule("aten.fft_fftshift.default", "aten.fft_ifftshift.default")
def shift(call: Call) -> Rule:
    """``fftshift(self, dim)``."""
    rank = len(call.out)
    over = call.arg(1, "dim")
    moved = {int(d) % rank for d in ((over,) if isinstance(over, int) else over)} if over is not None else set(range(rank))
    d = lead("d", rank)
    return Arguments(call, "self").rule({"self": text(d)}, text(d), linear=("self",), whole=[d[i] for i in sorted(moved)])


@rule("aten.stft.default", "aten.stft.center", "aten.istft.default")
def short_time_transform(call: Call) -> Rule:
    """``stft(self [B, T], n_fft, hop_length, win_length, window, ...)``; bilinear in the signal and the window."""
    args = Arguments(call, "self n_fft hop_length win_length window")
    before, after = len(args.shape("self")), len(call.out)
    batch = ["b"] if before == (3 if call.node.op == "aten.istft.default" else 2) else []
    i, o = lead("i", before - len(batch)), lead("o", after - len(batch))
    return args.rule(
        {"self": text(batch, i), "window": "w"},
        text(batch, o),
        # the inverse divides by the window's own energy: linear in the signal only
        linear=("self",) if call.node.op == "aten.istft.default" else ("self window",),
        whole=[*i, *o, "w"],
        saves=("self", "window"),
        flops_per_point=1.0,
    )
