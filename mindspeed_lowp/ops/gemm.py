"""The product of two matrices of codes: where scales, bias and rounding apply, and in which precision.

Every value of a format is exact in fp32, and so is every MX value. An fp32 GEMM on values is therefore the
hardware's product up to the order of its additions, which accumulate in fp32 on both. MX values are exact in
bf16 as well where they are not bf16 subnormals (CPU kernels flush those). A bf16 GEMM with fp32 accumulation
gives the same sums and differs only in the order of additions; it is used where its result needs nothing but
the last rounding (MX without a bias, bf16 output) and the CPU has instructions for it (AVX-512). Elsewhere
torch's bf16 GEMM is up to a hundred times slower than the fp32 one, and the fp32 GEMM is the fast path.
Scales that are no powers of two multiply the fp32 sums, which a bf16 GEMM does not give away.

Products of int8 are sums of integers, exact in fp64 and rounded to fp32 once.

Off the CPU the GEMM is always fp32. TF32, where the user allows it, costs nothing in accuracy: elements have
at most four significant bits, TF32 keeps eleven.

Operands are brought into row-major order first, so results depend on values, shapes and, as a GEMM's do, on
the number of threads; not on memory layout, for which a GEMM may give other bits.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_lowp.formats import E8M0_BIAS, MX_BLOCK, FormatInfo
from mindspeed_lowp.ops.scaling import MX, VECTORS, Scaling


class Decoders(NamedTuple):
    """What turns codes into values on a device, as fresh row-major tensors; all that devices differ in.

    Attributes:
        decode: ``(codes, src_type, dtype)``: the values of the codes alone; ``src_type`` is torch_npu's code
            of their format.
        dequantize: ``(codes, mxscale, axis, src_type, dtype, packed_dim)``: MX values, blocks along ``axis``,
            FP4 codes packed along ``packed_dim``.
    """

    decode: Callable[[Tensor, int, torch.dtype], Tensor]
    dequantize: Callable[[Tensor, Tensor, int, int, torch.dtype, int], Tensor]


class Operand(NamedTuple):
    """A matrix of codes with its scales.

    Attributes:
        codes: ``[M, K]`` or ``[K, N]``; FP4 codes are packed along either axis.
        format: of the codes.
        scale: MX and blocks: as `quant_matmul` has them. Vectors: ``[]`` for the whole matrix, ``[M]`` for
            the rows of the left or ``[N]`` for the columns of the right.
    """

    codes: Tensor
    format: FormatInfo
    scale: Tensor


@cache
def bf16_gemm_is_native() -> bool:
    """Whether this CPU multiplies bf16 matrices as fast as fp32 ones (oneDNN needs AVX-512 for that)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def matmul(
    device: Decoders,
    a: Operand,
    b: Operand,
    scaling: Scaling,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    """``a [M, K] @ b [K, N] (+ bias)``: fp32 accumulation, rounded once to ``output_dtype``."""
    if scaling is MX:
        result = _mx(device, a, b, bias, output_dtype)
    elif scaling is VECTORS:
        result = _vectors(device, a, b, bias)
    else:
        result = _blocks(device, a, b, scaling, bias)
    return result.to(output_dtype)


def _mx(device: Decoders, a: Operand, b: Operand, bias: Tensor | None, output_dtype: torch.dtype) -> Tensor:
    in_bf16 = (
        output_dtype == torch.bfloat16
        and bias is None  # the bias is added to the fp32 sum, before rounding
        and a.codes.device.type == "cpu"
        and bf16_gemm_is_native()
        and not may_hold_bf16_subnormals(a, 1)
        and not may_hold_bf16_subnormals(b, 0)
    )
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    result = mm(_dequantized(device, a, 1, dtype), _dequantized(device, b, 0, dtype))
    return result if bias is None else result.add_(bias)


def _vectors(device: Decoders, a: Operand, b: Operand, bias: Tensor | None) -> Tensor:
    """Scales of whole matrices, of rows of ``a`` and of columns of ``b``.

    With one scale on each side and no bias the hardware multiplies them first and applies the upper 19 bits
    of their product. Otherwise it multiplies by that of ``b``, then by that of ``a``, and adds the bias.
    """
    result = _product(_decoded(device, a), _decoded(device, b))
    if a.scale.dim() == b.scale.dim() == 0 and bias is None:
        return result.mul_(upper_19_bits(b.scale * a.scale))
    result.mul_(b.scale).mul_(a.scale.unsqueeze(-1))
    return result if bias is None else result.add_(bias)


def _blocks(device: Decoders, a: Operand, b: Operand, scaling: Scaling, bias: Tensor | None) -> Tensor:
    """One product for each block of K, times the product of its two scales, summed in fp32 in order."""
    m_size, n_size, k_size = scaling.group_sizes
    left, right = _decoded(device, a), _decoded(device, b)
    (m, k), n = left.shape, right.shape[1]
    left_scale = a.scale.repeat_interleave(m_size, 0)[:m] if m_size > 1 else a.scale
    right_scale = b.scale.repeat_interleave(n_size, 1)[:, :n]
    result = torch.zeros((m, n), dtype=torch.float32, device=left.device)
    for block, start in enumerate(range(0, k, k_size)):
        part = slice(start, start + k_size)
        product = _product(left[:, part], right[part])
        result += product.mul_(left_scale[:, block, None] * right_scale[block])
    return result if bias is None else result.add_(bias)


def _decoded(device: Decoders, x: Operand) -> Tensor:
    if x.format.dtype == torch.int8:
        return x.codes.to(torch.float64).contiguous()
    return device.decode(x.codes, x.format.npu_code, torch.float32).contiguous()


def _product(a: Tensor, b: Tensor) -> Tensor:
    return mm(a, b).to(torch.float32)


def mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in the operands' own precision, autocast or not."""
    device = a.device.type
    if torch.is_autocast_enabled(device):  # it would round the operands and the sums
        with torch.autocast(device, enabled=False):
            return torch.mm(a, b)
    return torch.mm(a, b)


def upper_19_bits(scale: Tensor) -> Tensor:
    """fp32 numbers as the hardware's output stage takes them: sign, exponent and ten bits of mantissa."""
    return (scale.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _dequantized(device: Decoders, x: Operand, axis: int, dtype: torch.dtype) -> Tensor:
    packed = packed_axis(x.codes.shape, x.scale.shape, axis) if x.format.bits == 4 else -1
    return device.dequantize(x.codes, x.scale, axis, x.format.npu_code, dtype, packed).contiguous()


def packed_axis(codes: torch.Size, mxscale: torch.Size, axis: int) -> int:
    """Which of its two axes an FP4 operand contracted over ``axis`` (0 or 1) is packed along.

    The scales say how long the other axis is; it is half as long in codes that are packed along it.
    """
    other = 1 - axis
    return axis if codes[other] == mxscale[other] else other


def may_hold_bf16_subnormals(x: Operand, axis: int) -> bool:
    """Whether a dequantized matrix may hold values other than 0 that are subnormal in bf16.

    True if a block with an element other than 0 has a scale so small that its smallest code would be.
    """
    lowest = E8M0_BIAS - 126 - int(math.log2(x.format.smallest))
    scale = x.scale.transpose(0, 1) if axis == 0 else x.scale  # [lines, ceil(n / 64), 2]
    scale = scale.reshape(scale.shape[0], -1)
    small = scale < lowest
    if not small.any():
        return False
    if x.format.bits == 4:
        return True  # not worth a look at nibbles: so small a scale is rare, and fp32 is right as well
    lines = (x.codes.t() if axis == 0 else x.codes).view(torch.uint8)  # [lines, n]
    lines = torch.nn.functional.pad(lines, (0, scale.shape[1] * MX_BLOCK - lines.shape[1]))
    blocks = lines.reshape(*scale.shape, MX_BLOCK)[small]
    return bool((blocks & 0x7F).any())
