"""What the runtime takes from torch beyond its public surface, in one place, with what is used where it is missing.

Tried on torch 2.13.0 (gloo, CPU).
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.tensor import Placement, Shard

try:
    # 2.13: a Shard that interleaves; private by its name only, the module is public
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:
    _StridedShard = None  # type: ignore[assignment, misc]


def split_placement(dim: int, groups: int) -> Placement:
    """The placement of a split along ``dim`` inside each of ``groups`` stretches.

    Without _StridedShard, a plain Shard: local tensors and training are the same, but ``full_tensor()`` would join the parts of a
    grouped split in another order (``gather_state_dict`` does not go through it).
    """
    if groups == 1 or _StridedShard is None:
        return Shard(dim)
    return _StridedShard(dim, split_factor=groups)


# 2.13 renamed these two; older versions have the old names only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
