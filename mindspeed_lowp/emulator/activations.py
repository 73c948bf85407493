"""SwiGLU, and softmax of masked attention scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MASKED = -10000.0  # what the operator puts in place of a masked score


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    """`silu(a) * b` for the two halves a, b of self along dim."""
    if self.shape[dim] % 2:
        raise ValueError(f"npu_swiglu: dimension {dim} of {list(self.shape)} cannot be halved")
    gate, up = self.float().chunk(2, dim)
    return (F.silu(gate) * up).to(self.dtype)


def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False
) -> Tensor:
    """Softmax over the last dimension of `scale * x` [B, N, Sq, Skv], -10000 where the mask is True.

    fixed_triu_mask: everything above the diagonal is masked, whatever mask says.
    """
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return torch.softmax((x.float() * scale).masked_fill(mask.bool(), _MASKED), -1).to(x.dtype)
