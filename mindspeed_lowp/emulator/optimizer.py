"""The fused optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW on `out` = (weight, first moment, second moment), in place; returns them.

    beta1_power, beta2_power: the powers of beta1 and beta2 of the steps before this one.
    max_grad_norm: with amsgrad, the largest second moment so far, in place too.
    """
    var, m, v = out
    g = -grad if maximize else grad
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    second = v
    if amsgrad:
        if max_grad_norm is None:
            raise ValueError("npu_apply_adam_w: amsgrad needs max_grad_norm")
        second = torch.maximum(max_grad_norm, v, out=max_grad_norm)
    denominator = (second / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
    var.mul_(1 - lr * weight_decay)
    var.addcdiv_(m / (1 - beta1_power * beta1), denominator, value=-lr)
    return var, m, v
