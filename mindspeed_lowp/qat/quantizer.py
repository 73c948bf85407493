"""Fake quantization as modules, for layers that this package does not know."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mindspeed_lowp.qat.grids import Grid, MXFP4Grid, ScaleMode
from mindspeed_lowp.qat.straight_through import straight_through, straight_through_learned


class FakeQuantizer(nn.Module):
    """Moves tensors to `grid`, blocks along `axis`; gradients pass straight through.

    It has no parameters and no buffers, so that a model's state_dict is the same with and without it.
    clip_grad: no gradient for elements that saturate.
    """

    def __init__(self, grid: Grid, clip_grad: bool = False, axis: int = -1) -> None:
        super().__init__()
        self.grid, self.clip_grad, self.axis = grid, clip_grad, axis

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(x, self.grid, axis=self.axis, clip_grad=self.clip_grad)

    def extra_repr(self) -> str:
        return f"{self.grid}, clip_grad={self.clip_grad}, axis={self.axis}"


class MXFP4FakeQuantizer(FakeQuantizer):
    """`mxfp4_fake_quant` as a module.

    learnable_scale_factor: the scale factor becomes a Parameter, `log2_scale_factor`, that starts at the
        given one and is learned along with the weights (by its logarithm, so that it stays positive).
    """

    def __init__(
        self,
        block_size: int = 32,
        scale_factor: float = 6.0,
        clip_grad: bool = False,
        backend: str = "auto",
        *,
        scale_mode: ScaleMode = "round",
        axis: int = -1,
        learnable_scale_factor: bool = False,
    ) -> None:
        super().__init__(MXFP4Grid(block_size, scale_factor, scale_mode, backend), clip_grad, axis)
        start = nn.Parameter(torch.tensor(math.log2(scale_factor))) if learnable_scale_factor else None
        self.register_parameter("log2_scale_factor", start)

    def forward(self, x: Tensor) -> Tensor:
        if self.log2_scale_factor is None:
            return super().forward(x)
        return straight_through_learned(
            x, self.log2_scale_factor, self.grid, axis=self.axis, clip_grad=self.clip_grad
        )
