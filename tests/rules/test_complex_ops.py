"""Complex numbers and Fourier transforms against the law."""

import pytest
import torch
from given import Given, positive
from law import SAMPLES, check, f, ops_here, samples

BEFORE = set(SAMPLES)


def c(*shape):
    return f(*shape, dtype=torch.complex128)


samples("aten.view_as_real.default", (c(4, 5),))
samples("aten.view_as_complex.default", (f(4, 5, 2),))
samples("aten.complex.default", (f(4, 5), f(4, 1)))
samples("aten.polar.default", (f(4, 5, make=positive), f(5)))
for _name in ("real", "imag", "conj", "_conj", "conj_physical"):
    samples(f"aten.{_name}.default", (c(4, 5),))
for _name, _x in {"fft": c, "ifft": c, "hfft": c, "irfft": c, "rfft": f, "ihfft": f}.items():
    samples(f"aten.fft_{_name}.default", (_x(4, 5, 6),), (_x(4, 5, 6), 4, 1), (_x(4, 5, 6), None, 1, "ortho"))
for _name, _x in {"fftn": c, "ifftn": c, "irfftn": c, "rfftn": f, "fft2": c, "ifft2": c, "irfft2": c, "rfft2": f}.items():
    samples(f"aten.fft_{_name}.default", (_x(4, 5, 6), None, [1, 2]), (_x(4, 5, 6),))
samples("aten.fft_fftn.default", (c(4, 5, 6), [3]))
for _name in ("fftshift", "ifftshift"):
    samples(f"aten.fft_{_name}.default", (f(4, 5, 6), [1]), (f(4, 5, 6),))
WINDOW = Given((8,), torch.float64, False, values=torch.hann_window(8, dtype=torch.float64).tolist())
samples("aten.stft.default", (f(4, 32), 8, 4, 8, WINDOW, False, True, True))
samples("aten.stft.center", (f(4, 32), 8, 4, 8, WINDOW, True, "reflect", False, True, True))
samples("aten.istft.default", (c(4, 5, 9), 8, 4, 8, WINDOW))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)
