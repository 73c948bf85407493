"""MXFP4 fake quantization."""

from itertools import pairwise

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, FP4_VALUES

#: How the exponent of a scale becomes an integer.
SCALE_MODES = ("round", "floor", "ceil")

_CODES = FP4_VALUES[E2M1]
_MIDPOINTS = [(lower + upper) / 2 for lower, upper in pairwise(_CODES)]


def amax_divisor(scale_factor: float, scale_mode: str) -> float:
    """What a block's largest magnitude is divided by to give its scale before that is a power of two.

    `floor` is OCP's rule for a factor of 6: ``floor(log2(amax)) - 2``, so the divisor is 4 then.
    """
    return scale_factor * 2**E2M1.emax / E2M1.max if scale_mode == "floor" else scale_factor


def block_scale(amax: Tensor, scale_factor: float, scale_mode: str = "round") -> Tensor:
    """The power of two that blocks with the largest magnitudes ``amax`` (fp32) share; Inf if not finite."""
    # A tensor as divisor: by a Python number, CUDA would multiply with its rounded reciprocal.
    raw = (amax / amax.new_full((), amax_divisor(scale_factor, scale_mode))).clamp(min=2.0**-30)
    if scale_mode == "round":
        # Through fp64, because a device's own fp32 log2 may be off by one in the last place.
        exponent = raw.double().log2().float().round()
    else:
        bits = raw.view(torch.int32)
        exponent = (bits >> 23) - 127
        if scale_mode == "ceil":
            exponent = exponent + (bits & 0x7FFFFF > 0)
    exponent = torch.where(raw.isfinite(), exponent, 128).to(torch.int32)
    return ((exponent + 127) << 23).view(torch.float32)


def quant_dequant_mxfp4(x: Tensor, scale_factor: float, block_size: int, scale_mode: str = "round") -> Tensor:
    n = x.shape[-1]
    blocks = -(-n // block_size)
    v = torch.nn.functional.pad(x.float(), (0, blocks * block_size - n))
    v = v.reshape(*x.shape[:-1], blocks, block_size)
    scale = block_scale(v.abs().amax(dim=-1, keepdim=True), scale_factor, scale_mode)
    v = v / scale
    nearest = torch.bucketize(
        v.abs(), v.new_tensor(_MIDPOINTS), right=True
    )  # midpoints belong to the upper code
    v = v.sign() * v.new_tensor(_CODES)[nearest] * scale
    v = torch.where(scale.isinf(), torch.nan, v)
    return v.reshape(*x.shape[:-1], blocks * block_size)[..., :n].to(x.dtype).contiguous()
