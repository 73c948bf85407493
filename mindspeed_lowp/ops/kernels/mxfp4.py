"""The kernel of MXFP4 fake quantization."""

import ctypes

import torch
from torch import Tensor

from mindspeed_lowp.ops.kernels import INPUT, INT, INT64, POINTER, function
from mindspeed_lowp.ops.reference.mxfp4 import SCALE_MODES, amax_divisor

_quant_dequant = function(
    "lowp_mxfp4_quant_dequant", [POINTER] * 2 + [INT64] * 3 + [ctypes.c_float] + [INT] * 3
)


def quant_dequant_mxfp4(x: Tensor, scale_factor: float, block_size: int, scale_mode: str = "round") -> Tensor:
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    n = x.shape[-1]
    _quant_dequant(
        x.data_ptr(),
        y.data_ptr(),
        x.numel() // n if n else 0,
        n,
        block_size,
        amax_divisor(scale_factor, scale_mode),
        SCALE_MODES.index(scale_mode),
        INPUT[x.dtype],
        torch.get_num_threads(),
    )
    return y
