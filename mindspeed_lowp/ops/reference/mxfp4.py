"""MXFP4 fake quantization."""

from itertools import pairwise

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, FP4_VALUES

_CODES = FP4_VALUES[E2M1]
_MIDPOINTS = [(lower + upper) / 2 for lower, upper in pairwise(_CODES)]


def _scale(amax: Tensor, scale_factor: float) -> Tensor:
    """The power of two nearest to ``amax / scale_factor``, as fp32 arithmetic finds it; Inf if not finite."""
    # A tensor as divisor: by a Python number, CUDA would multiply with its rounded reciprocal.
    raw = (amax / amax.new_full((), scale_factor)).clamp(min=2.0**-30)
    # Through fp64, because a device's own fp32 log2 may be off by one in the last place.
    exponent = raw.double().log2().float().round()
    exponent = torch.where(raw.isfinite(), exponent, 128).to(torch.int32)
    return ((exponent + 127) << 23).view(torch.float32)


def quant_dequant_mxfp4(x: Tensor, scale_factor: float, block_size: int) -> Tensor:
    n = x.shape[-1]
    blocks = -(-n // block_size)
    v = torch.nn.functional.pad(x.float(), (0, blocks * block_size - n))
    v = v.reshape(*x.shape[:-1], blocks, block_size)
    scale = _scale(v.abs().amax(dim=-1, keepdim=True), scale_factor)
    v = v / scale
    nearest = torch.bucketize(
        v.abs(), v.new_tensor(_MIDPOINTS), right=True
    )  # midpoints belong to the upper code
    v = v.sign() * v.new_tensor(_CODES)[nearest] * scale
    v = torch.where(scale.isinf(), torch.nan, v)
    return v.reshape(*x.shape[:-1], blocks * block_size)[..., :n].to(x.dtype).contiguous()
