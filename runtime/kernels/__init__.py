"""Kernels of the strategies that the plain op cannot run on local parts: one file per op family, one table to find them."""

from runtime.kernels.base import KERNELS, Kernel, KernelInfo, kernel

__all__ = ["KERNELS", "Kernel", "KernelInfo", "kernel"]
