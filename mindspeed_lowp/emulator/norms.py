"""RMS normalization."""

from __future__ import annotations

import torch
from torch import Tensor


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """`x * rsqrt(mean(x²) + epsilon) * gamma` over the last dimensions, as many as gamma has.

    self: bf16, fp16 or fp32; gamma: of the same dtype -> the result of self's dtype, and the reciprocal root,
    fp32, with size 1 in the dimensions normalized over.
    """
    if self.shape[-gamma.dim() :] != gamma.shape:
        raise ValueError(f"npu_rms_norm: gamma {list(gamma.shape)} is no tail of self {list(self.shape)}")
    x = self.float()
    over = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(self.dtype), rstd.detach()
