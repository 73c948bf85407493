"""MX quantization and dequantization."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E8M0_NAN, MX_BLOCK, FormatInfo, format_of
from mindspeed_lowp.ops import layout


def _fp32_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def shared_scale(amax: Tensor, info: FormatInfo, scale_alg: int) -> Tensor:
    """E8M0 scale bytes (int32) for blocks' largest magnitudes ``amax`` (fp32); 0xFF where not finite."""
    if scale_alg == 0:
        # The exponent field is floor(log2(amax)) exactly; torch.log2 rounds up just below a power of two.
        byte = ((_fp32_bits(amax) >> 23) - info.emax).clamp(min=0)
    else:
        bits = _fp32_bits(amax / info.max)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        normal = (exponent > 0) & (exponent < 254) & (mantissa > 0)
        subnormal = (exponent == 0) & (mantissa > 1 << 22)
        byte = exponent + (normal | subnormal)
    return torch.where(amax.isfinite(), byte, E8M0_NAN)


def _quantize_blocks(x: Tensor, info: FormatInfo, scale_alg: int) -> tuple[Tensor, Tensor]:
    """``x [outer, n, inner]`` to codes of the same shape and scale bytes ``[outer, ceil(n / 32), inner]``."""
    outer, n, inner = x.shape
    blocks = -(-n // MX_BLOCK)
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, blocks * MX_BLOCK - n)).contiguous()
    x = x.view(outer, blocks, MX_BLOCK, inner)
    byte = shared_scale(x.abs().amax(dim=2), info, scale_alg)
    inverse = ((254 - byte) << 23).view(torch.float32).unsqueeze(2)  # 2 ** (127 - byte), never subnormal
    scaled = (x * inverse).clamp(-info.max, info.max)
    # A block with NaN or Inf has elements +0; its scale makes every product NaN.
    scaled = torch.where(byte.unsqueeze(2) == E8M0_NAN, 0.0, scaled)
    codes = scaled.to(info.dtype).view(outer, blocks * MX_BLOCK, inner)[:, :n]
    return codes, byte.to(torch.uint8)


def dynamic_mx_quant(x: Tensor, axis: int, dst_type: torch.dtype, scale_alg: int) -> tuple[Tensor, Tensor]:
    codes, byte = _quantize_blocks(x.reshape(layout.collapse(x.shape, axis)), format_of(dst_type), scale_alg)
    mxscale = layout.interleave(byte).view(layout.scale_shape(x.shape, axis))
    return codes.reshape(x.shape).contiguous(), mxscale


def dynamic_mx_quant_with_dual_axis(
    x: Tensor, dst_type: torch.dtype, scale_alg: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    last = dynamic_mx_quant(x, x.dim() - 1, dst_type, scale_alg)
    return *last, *dynamic_mx_quant(x, x.dim() - 2, dst_type, scale_alg)


def grouped_dynamic_mx_quant(
    x: Tensor, group_index: Tensor, dst_type: torch.dtype, scale_alg: int
) -> tuple[Tensor, Tensor]:
    ends = layout.group_index_ends(group_index, x.shape[0])
    y = x.new_empty(x.shape, dtype=dst_type)
    mxscale = x.new_zeros(layout.grouped_scale_shape(x.shape, len(ends)), dtype=torch.uint8)
    start = 0
    for group, end in enumerate(ends):
        if end > start:
            codes, scale = dynamic_mx_quant(x[start:end], 0, dst_type, scale_alg)
            y[start:end] = codes
            row = layout.group_scale_row(start, group)
            mxscale[row : row + len(scale)] = scale
        start = end
    return y, mxscale


def anti_mx_quant(codes: Tensor, mxscale: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    outer, n, inner = layout.collapse(codes.shape, axis)
    blocks = -(-n // MX_BLOCK)
    byte = layout.deinterleave(mxscale.reshape(outer, -(-blocks // 2), inner, 2), blocks).to(torch.int32)
    bits = torch.where(byte == 0, 1 << 22, byte << 23)  # 2 ** -127 is subnormal in fp32
    scale = bits.view(torch.float32).masked_fill(byte == E8M0_NAN, float("nan"))
    scale = scale.repeat_interleave(MX_BLOCK, dim=1)[:, :n]
    value = codes.reshape(outer, n, inner).float() * scale
    return value.view(codes.shape).to(dtype)
