"""Pooling, resizing and resampling against the law."""

import pytest
from law import SAMPLES, check, f, ops_here, samples

BEFORE = set(SAMPLES)

for _n in (1, 2, 3):
    _x, _one = f(4, 5, *(6, 8, 6)[:_n]), f(5, *(6, 8, 6)[:_n])
    for _name in ("avg_pool", "adaptive_avg_pool", "max_pool", "adaptive_max_pool"):
        samples(f"aten.{_name}{_n}d.default", (_x, [2] * _n), (_one, [2] * _n))
    samples(f"aten.max_pool{_n}d_with_indices.default", (_x, [2] * _n))
    if _n > 1:
        samples(f"aten._adaptive_avg_pool{_n}d.default", (_x, [2] * _n))
    for _name in (f"upsample_nearest{_n}d", f"_upsample_nearest_exact{_n}d"):
        _x = f(4, 5, *[4] * _n)
        samples(f"aten.{_name}.default", (_x, [7] * _n))
        samples(f"aten.{_name}.vec", (_x, [7] * _n, None), (_x, None, [2.0] * _n))
for _name, _n in {
    "upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3, "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}.items():  # fmt: skip
    _x = f(4, 5, *[4] * _n)
    samples(f"aten.{_name}.default", (_x, [7] * _n, False))
    samples(f"aten.{_name}.vec", (_x, [7] * _n, True, None), (_x, None, False, [2.0] * _n))
samples("aten.pixel_shuffle.default", (f(4, 24, 3, 5), 2), (f(4, 4, 3, 5), 2), (f(8, 4, 6), 2))
samples("aten.pixel_unshuffle.default", (f(4, 3, 8, 6), 2), (f(3, 8, 6), 2))
for _op in ("aten.grid_sampler.default", "aten.grid_sampler_2d.default"):
    samples(_op, (f(4, 5, 6, 6), f(4, 3, 7, 2), 0, 0, False))
samples("aten.grid_sampler_3d.default", (f(4, 5, 4, 4, 4), f(4, 3, 4, 3, 3), 0, 0, False))
samples("aten.affine_grid_generator.default", (f(4, 2, 3), [4, 3, 5, 6], False), (f(4, 3, 4), [4, 2, 3, 4, 5], False))


@pytest.mark.parametrize("op", ops_here(BEFORE))
def test_law(op):
    check(op)
