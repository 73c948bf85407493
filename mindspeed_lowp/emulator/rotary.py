"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """`r1 * x + r2 * rotated(x)` for x of four dimensions; r1 and r2 (cosines, sines) broadcast to x.

    rotary_mode: "half" rotates the two halves of the last dimension, (x1, x2) -> (-x2, x1); "interleave" each
        pair of neighbours.
    rotate: [D, D]; then rotated(x) is `x @ rotate`, whatever the mode.
    """
    x = self.float()
    if rotate is not None:
        rotated = x @ rotate.float()
    elif rotary_mode == "half":
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    elif rotary_mode == "interleave":
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        raise ValueError(f"npu_rotary_mul: rotary_mode={rotary_mode!r}: expected 'half' or 'interleave'")
    return (r1.float() * x + r2.float() * rotated).to(self.dtype)
