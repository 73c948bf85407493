"""MXFP4 fake quantization: to blocks of FP4 and back, for experiments and quantization-aware training."""

import math

import torch
from torch import Tensor

from mindspeed_lowp.formats import E2M1, MX_BLOCK
from mindspeed_lowp.ops import _checks
from mindspeed_lowp.ops._library import operator
from mindspeed_lowp.ops.kernels import mxfp4 as kernels
from mindspeed_lowp.ops.npu import mxfp4 as npu
from mindspeed_lowp.ops.reference import mxfp4 as reference

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_FP32 = torch.finfo(torch.float32)

# What the public function does not offer, quantization-aware training needs: other block sizes, the divisor
# itself, and other rules for the scale, with E = amax / scale_factor:
#   round  2 ** round(log2(E)), as below: the nearest power of two
#   floor  2 ** floor(log2(E * 3 / 2)): OCP's, floor(log2(amax)) - 2, for a factor of 6
#   ceil   2 ** ceil(log2(E)): for a factor of 6, the least with which nothing saturates
_quant_dequant_mxfp4 = operator(
    "quant_dequant_mxfp4(Tensor x, float scale_factor, int block_size, str scale_mode='round') -> Tensor",
    reference=reference.quant_dequant_mxfp4,
    kernel=kernels.quant_dequant_mxfp4,
    npu=npu.quant_dequant_mxfp4,
    older_npu=npu.quant_dequant_mxfp4,
    fake=lambda x, *how: x.new_empty(x.shape),
)


@_checks.names_arguments
def quant_dequant_mxfp4(x: Tensor, inv_scale_factor_scale: float = 1.0) -> Tensor:
    """The values that ``x`` has after quantization to MXFP4: blocks of 32 along the last axis, E2M1 elements.

    With the largest magnitude ``amax`` of a block, in fp32 and in this order::

        scale_factor = 6 / inv_scale_factor_scale
        scale        = 2 ** round(log2(max(amax / scale_factor, 2 ** -30)))
        result       = sign(x / scale) * code(|x / scale|) * scale

    ``log2`` is the logarithm rounded to fp32, ``round`` takes halves to even. (A large logarithm has few bits
    left for its fraction: within some 30 units in the last place of ``sqrt(2)`` times a power of two, which
    of two scales a block gets depends on the exponent.) Unlike in `dynamic_mx_quant`, the scale is the
    *nearest* power of two: the largest elements may saturate, at 6 times the scale.

    ``code`` is the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6. The midpoints 0.25, 0.75, 1.25, 1.75, 2.5, 3.5 and
    5 belong to the upper code. A negative element that rounds to zero gives -0, unless the division has
    already underflowed; -0 gives +0.

    A last axis that is not a multiple of 32 ends in a shorter block; blocks never cross rows. A block with
    NaN or Inf, or whose ``scale`` overflows, is NaN throughout.

    Args:
        x: bf16, fp16 or fp32, at least 1 dimension, any memory layout; may be empty.
        inv_scale_factor_scale: greater than 0; above 1 the scale is larger and fewer elements saturate, below
            1 the reverse.

    Returns:
        The values, contiguous, of ``x``'s shape and dtype. Exact in bf16 and fp32; in fp16, rounded once
        below ``2 ** -14`` and Inf from ``2 ** 16``.

    Raises:
        ValueError: naming the argument that is not supported.

    On an NPU this is the FakeQuant toolkit's compiled operator (``torch.ops.amct.quant_dequant_mxfp4``)
    where it has been loaded or is found through MXFP4_ASCENDC_PATH, else the reference. The compiled operator
    equals the definition above for finite bf16 and fp16 input and the default factor. Otherwise it may not:
    it multiplies by an fp32 ``inv_scale_factor_scale / 6`` and turns to the next scale at one mantissa
    (``0x3504F3``) for all exponents, so that fp32 blocks near a turning point may get the other scale; it
    takes scaled elements less than ``1e-6`` below 2.5, 3.5 and 5 for these midpoints; and what NaN and Inf
    give is not defined there.

    Source: the FakeQuant toolkit of hicann/amct (``experimental/fakequant/mxfp4_ascendc``): its PyTorch
    reference, of which ours has every bit.
    """
    _checks.dtype("x", x, _FLOATS)
    if x.dim() == 0:
        raise ValueError("x has 0 dimensions; at least 1 is needed, blocks lie along the last")
    if not (
        0.0 < inv_scale_factor_scale < math.inf
        and _FP32.tiny <= E2M1.max / inv_scale_factor_scale <= _FP32.max
    ):
        raise ValueError(
            f"inv_scale_factor_scale={inv_scale_factor_scale!r} is not supported; use a number greater than 0"
            " by which 6 can be divided in fp32"
        )
    return _quant_dequant_mxfp4(x, E2M1.max / inv_scale_factor_scale, MX_BLOCK)
