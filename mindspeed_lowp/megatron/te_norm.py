"""Layer norms under Transformer Engine's name, without it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from mindspeed_lowp.megatron.extra_state import ignore_extra_state


class TENorm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, as `config.normalization` says.

    has_residual: that a residual connection follows; a hint for Transformer Engine's fused kernel only.

    Raises ValueError for another normalization, and for --fused-residual-rmsnorm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        has_residual: bool = False,
    ) -> None:
        super().__init__()
        if config.fused_residual_rmsnorm:
            raise ValueError("--fused-residual-rmsnorm is a kernel of Transformer Engine: leave the flag out")
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight, bias = new_norm_parameters(config, hidden_size)
        self.register_parameter("bias", bias)
        ignore_extra_state(self)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        return normalize(x, self.weight, self.bias, self.eps, self.zero_centered_gamma)


def new_norm_parameters(config: TransformerConfig, hidden_size: int) -> tuple[Parameter, Parameter | None]:
    """The initialized weight [hidden_size], and the bias [hidden_size] of a LayerNorm or None of an RMSNorm.

    Under sequence parallelism each rank sees its part of the sequence only: the parameters are marked, so
    that Megatron adds up their gradients.
    """
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"--normalization {config.normalization}: expected LayerNorm or RMSNorm")
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    options = {"device": device, "dtype": config.params_dtype}
    weight = Parameter(
        torch.full((hidden_size,), 0.0 if config.layernorm_zero_centered_gamma else 1.0, **options)
    )
    bias = Parameter(torch.zeros(hidden_size, **options)) if config.normalization == "LayerNorm" else None
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.sequence_parallel = config.sequence_parallel
    return weight, bias


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """LayerNorm of x [..., N] with a bias, RMSNorm without one -> x's shape and dtype.

    zero_centered_gamma: the weight holds its distance from 1, which 16 bits resolve much finer than 1 plus
        it; so the sum, and what it multiplies, is in fp32.
    """
    dtype = x.dtype
    if zero_centered_gamma:
        x, weight = x.float(), 1 + weight.float()
        bias = None if bias is None else bias.float()
    if bias is None:
        y = F.rms_norm(x, weight.shape, weight, eps)
    else:
        y = F.layer_norm(x, weight.shape, weight, bias, eps)
    return y.to(dtype)
