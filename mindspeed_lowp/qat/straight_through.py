"""The straight-through estimator: forward computes with fake-quantized values, backward ignores the rounding.

forward    y = Q(x)
backward   dL/dx = dL/dy                        plain
           dL/dx = dL/dy * (|x| <= 6 * scale)   clipped: nothing for elements that saturated
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_lowp.qat.grids import Grid, MXFP4Grid


def straight_through(x: Tensor, grid: Grid, *, axis: int = -1, clip_grad: bool = False) -> Tensor:
    """x on `grid`, blocks along `axis`, with the gradient above; same shape and dtype."""
    return _StraightThrough.apply(x, grid, axis, clip_grad)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grid, axis, clip_grad):
        # A weight is alive anyway, and a mask in forward would be in the graph of every exported model.
        ctx.save_for_backward(x if clip_grad else None)
        ctx.grid, ctx.axis = grid, axis
        return grid.project(x, axis)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if x is not None:
            grad = grad.masked_fill(ctx.grid.saturated(x, ctx.axis), 0.0)
        return grad, None, None, None


def straight_through_learned(
    x: Tensor, log2_scale_factor: Tensor, grid: MXFP4Grid, *, axis: int = -1, clip_grad: bool = False
) -> Tensor:
    """The same with `2 ** log2_scale_factor` ([], fp32) as the grid's scale factor, and a gradient for it.

    Rounding is ignored once more, now that of the scale's exponent. With y = q s, q = x / s where x does not
    saturate and otherwise the largest code, and s falling by log 2 with each unit of the parameter::

        dL/dp = -log(2) * sum(dL/dy * (y - x)),   the summands of saturated elements without the x

    which is LSQ's gradient (arXiv 1902.08153) for the logarithm of a step size. The value is read on the
    host, once a call.
    """
    return _Learned.apply(x, log2_scale_factor, grid, axis, clip_grad)


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log2_scale_factor, grid, axis, clip_grad):
        grid = replace(grid, scale_factor=2.0 ** log2_scale_factor.item())
        y = grid.project(x, axis)
        ctx.save_for_backward(x, y)
        ctx.grid, ctx.axis, ctx.clip_grad = grid, axis, clip_grad
        ctx.parameter_dtype = log2_scale_factor.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        saturated = ctx.grid.saturated(x, ctx.axis)
        error = y.float() - x.float().masked_fill(saturated, 0.0)
        grad_parameter = (-math.log(2.0) * (grad.float() * error).sum()).to(ctx.parameter_dtype)
        grad_x = grad.masked_fill(saturated, 0.0) if ctx.clip_grad else grad
        return grad_x, grad_parameter, None, None, None
