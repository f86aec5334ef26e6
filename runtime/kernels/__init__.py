"""Kernels of the strategies that the plain op cannot run on local parts: one file per op family, one table to find them."""

from runtime.kernels import attention, embedding, losses, moe, normalization, reductions, softmax
from runtime.kernels.base import KERNELS, Kernel, KernelInfo, kernel

__all__ = ["KERNELS", "Kernel", "KernelInfo", "attention", "embedding", "kernel", "losses", "moe", "normalization", "reductions", "softmax"]
