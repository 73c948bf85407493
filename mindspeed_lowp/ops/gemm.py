"""The product of two dequantized matrices: which precision a GEMM runs in, and why.

Every MXFP8 value is exact in fp32, and in bf16 as well where it is not a bf16 subnormal (CPU kernels flush
those). A bf16 GEMM with fp32 accumulation therefore gives the same products as an fp32 GEMM and differs only
in the order of additions; it is used where the CPU has instructions for it (AVX-512). Elsewhere torch's bf16
GEMM is up to a hundred times slower than the fp32 one, and the fp32 GEMM is the fast path.

Off the CPU the GEMM is always fp32. TF32, where the user allows it, costs nothing in accuracy: elements have
at most four significant bits, TF32 keeps eleven.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from mindspeed_lowp.formats import E8M0_BIAS, MX_BLOCK, format_of

#: ``dequantize(codes, mxscale, axis, src_type, dtype)``: values as a fresh row-major matrix of ``dtype``.
Dequantize = Callable[[Tensor, Tensor, int, int, torch.dtype], Tensor]


@cache
def bf16_gemm_is_native() -> bool:
    """Whether this CPU multiplies bf16 matrices as fast as fp32 ones (oneDNN needs AVX-512 for that)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def may_hold_bf16_subnormals(codes: Tensor, mxscale: Tensor, axis: int) -> bool:
    """Whether a dequantized matrix may hold values other than 0 that are subnormal in bf16.

    True if a block with an element other than 0 has a scale so small that its smallest code would be.
    """
    lowest = E8M0_BIAS - 126 - int(math.log2(format_of(codes.dtype).smallest))
    scale = mxscale.transpose(0, 1) if axis == 0 else mxscale  # [lines, ceil(n / 64), 2]
    scale = scale.reshape(scale.shape[0], -1)
    small = scale < lowest
    if not small.any():
        return False
    lines = (codes.t() if axis == 0 else codes).view(torch.uint8)  # [lines, n]
    lines = torch.nn.functional.pad(lines, (0, scale.shape[1] * MX_BLOCK - lines.shape[1]))
    blocks = lines.reshape(*scale.shape, MX_BLOCK)[small]
    return bool((blocks & 0x7F).any())


def matmul(
    dequantize: Dequantize,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    """``a [M, K] @ b [K, N] (+ bias)``, both MX along K: fp32 accumulation, rounded once to ``output_dtype``.

    ``dequantize`` brings both operands into row-major order, so the result depends on values and shapes only:
    a GEMM may give other bits for a transposed view of the same matrix.
    """
    in_bf16 = (
        output_dtype == torch.bfloat16
        and bias is None  # the bias is added to the fp32 sum, before rounding
        and a.device.type == "cpu"
        and bf16_gemm_is_native()
        and not may_hold_bf16_subnormals(a, a_scale, 1)
        and not may_hold_bf16_subnormals(b, b_scale, 0)
    )
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    left = dequantize(a, a_scale, 1, format_of(a.dtype).npu_code, dtype)
    right = dequantize(b, b_scale, 0, format_of(b.dtype).npu_code, dtype)
    with torch.autocast(a.device.type, enabled=False):  # it would round the sums before the bias is added
        result = torch.mm(left, right)
    if bias is not None:
        result += bias
    return result.to(output_dtype)
