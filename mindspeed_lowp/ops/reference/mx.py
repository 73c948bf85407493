"""MX quantization and dequantization."""

import torch
from torch import Tensor

from mindspeed_lowp.formats import E8M0_NAN, MX_BLOCK, MX_FORMATS, FormatInfo, code_values, format_of
from mindspeed_lowp.ops import layout
from mindspeed_lowp.ops.reference.casts import encode


def _fp32_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


# ---- shared scales ----

#: Bits of a bf16 significand above which `scale_alg` 2 takes the next power of two, by `dst_type_max`: those
#: of 1.5 (6.0), 1.75 (7.0) and 1.875. Other values of `dst_type_max` are divided by.
CARRY_ABOVE = {6.0: 0x40, 7.0: 0x60, 1.875: 0x70}


def shared_scale(
    amax: Tensor, info: FormatInfo, scale_alg: int, dst_type_max: float = 0.0, max_low_bound: float = 0.0
) -> Tensor:
    """E8M0 scale bytes (int32) for blocks' largest magnitudes ``amax`` (fp32); 0xFF where not finite."""
    limit = dst_type_max or info.max
    if scale_alg == 0:
        # The exponent field is floor(log2(amax)) exactly; torch.log2 rounds up just below a power of two.
        byte = (_fp32_bits(amax) >> 23) - info.emax
    elif scale_alg == 2 and limit in CARRY_ABOVE:
        bits = _fp32_bits(amax.bfloat16().float()) >> 16
        normal = bits >= 1 << 7
        byte = (bits >> 7) + (normal & ((bits & 0x7F) > CARRY_ABOVE[limit])) - info.emax
    else:
        # By a tensor: CUDA multiplies with the rounded reciprocal of a Python number.
        bits = _fp32_bits(amax.clamp(min=max_low_bound) / amax.new_full((), limit))
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        up = (exponent > 0) & (exponent < 254) & (mantissa > 0)
        if scale_alg == 1:
            up |= (exponent == 0) & (mantissa > 1 << 22)
        byte = exponent + up
    return torch.where(amax.isfinite(), byte.clamp(0, 254), E8M0_NAN)


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** exponent`` as fp32, exponents (int32) from -127, which is subnormal, to 127."""
    byte = exponent + 127
    return torch.where(byte == 0, 1 << 22, byte << 23).view(torch.float32)


# ---- elements ----


def _encode_scaled(x: Tensor, byte: Tensor, info: FormatInfo, round_mode: str) -> Tensor:
    """Codes, one a byte, of ``x / 2 ** (byte - 127)`` (fp32); +0 where the byte is 0xFF."""
    scaled = x * _power_of_two(127 - byte.clamp(max=254))
    # What underflows is no zero: rounded down, a negative number becomes the smallest code.
    scaled = torch.where((scaled == 0) & (x != 0), torch.copysign(x.new_tensor(1e-30), x), scaled)
    # A block with NaN or Inf has elements +0; its scale makes every product NaN.
    scaled = torch.where(byte == E8M0_NAN, 0.0, scaled)
    if info.bits == 4:
        return encode(scaled, info, round_mode)
    return scaled.clamp(-info.max, info.max).to(info.dtype)  # the same, and faster


# ---- operators ----


def dynamic_mx_quant(
    x: Tensor,
    axis: int,
    dst_type: int,
    round_mode: str,
    block_size: int,
    scale_alg: int,
    dst_type_max: float,
    max_low_bound: float,
) -> tuple[Tensor, Tensor]:
    info = format_of(dst_type, MX_FORMATS)
    outer, n, inner = layout.collapse(x.shape, axis)
    blocks = -(-n // block_size)
    values = x.reshape(outer, n, inner).float()
    values = torch.nn.functional.pad(values, (0, 0, 0, blocks * block_size - n)).contiguous()
    values = values.view(outer, blocks, block_size, inner)
    byte = shared_scale(values.abs().amax(dim=2), info, scale_alg, dst_type_max, max_low_bound)
    codes = _encode_scaled(values, byte.unsqueeze(2), info, round_mode)
    codes = codes.view(outer, blocks * block_size, inner)[:, :n].reshape(x.shape).contiguous()
    mxscale = layout.interleave(byte.to(torch.uint8)).view(layout.scale_shape(x.shape, axis, block_size))
    return layout.pack_fp4(codes) if info.bits == 4 else codes, mxscale


def dynamic_mx_quant_with_dual_axis(
    x: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rest = (dst_type, round_mode, MX_BLOCK, scale_alg, dst_type_max, 0.0)
    last = x.dim() - 1
    return *dynamic_mx_quant(x, last, *rest), *dynamic_mx_quant(x, last - 1, *rest)


def dynamic_block_mx_quant(
    x: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
) -> tuple[Tensor, Tensor, Tensor]:
    info = format_of(dst_type, MX_FORMATS)
    rows, cols = x.shape[-2:]
    down, across = -(-rows // MX_BLOCK), -(-cols // MX_BLOCK)
    values = torch.nn.functional.pad(x.float(), (0, across * MX_BLOCK - cols, 0, down * MX_BLOCK - rows))
    values = values.reshape(-1, down, MX_BLOCK, across, MX_BLOCK)
    byte = shared_scale(values.abs().amax(dim=(2, 4)), info, scale_alg, dst_type_max)
    tile_byte = byte[:, :, None, :, None]
    if x.dtype == torch.bfloat16:
        # Subnormals of bf16 count as 0, before as after scaling.
        kept = values.abs() >= torch.finfo(torch.bfloat16).smallest_normal
        kept &= values.abs() > _power_of_two(tile_byte.clamp(max=254) - 127) * 2.0**-134
        values = torch.where(kept, values, torch.copysign(torch.zeros_like(values), values))
    codes = _encode_scaled(values, tile_byte, info, round_mode)
    codes = (
        codes.reshape(-1, down * MX_BLOCK, across * MX_BLOCK)[:, :rows, :cols].reshape(x.shape).contiguous()
    )
    byte = byte.to(torch.uint8)
    each_row = byte.repeat_interleave(MX_BLOCK, dim=1)[:, :rows].reshape(-1, across, 1)
    each_column = byte.repeat_interleave(MX_BLOCK, dim=2)[:, :, :cols]
    scale1 = layout.interleave(each_row).view(layout.scale_shape(x.shape, x.dim() - 1))
    scale2 = layout.interleave(each_column).view(layout.scale_shape(x.shape, x.dim() - 2))
    return layout.pack_fp4(codes) if info.bits == 4 else codes, scale1, scale2


def grouped_dynamic_mx_quant(
    x: Tensor, group_index: Tensor, dst_type: int, round_mode: str, scale_alg: int, dst_type_max: float
) -> tuple[Tensor, Tensor]:
    info = format_of(dst_type, MX_FORMATS)
    ends = layout.group_index_ends(group_index, x.shape[0])
    y = x.new_empty(layout.packed_shape(x.shape, info.bits), dtype=info.dtype)
    mxscale = x.new_zeros(layout.grouped_scale_shape(x.shape, len(ends)), dtype=torch.uint8)
    start = 0
    for group, end in enumerate(ends):
        if end > start:
            part = x[start:end]
            y[start:end], scale = dynamic_mx_quant(
                part, 0, dst_type, round_mode, MX_BLOCK, scale_alg, dst_type_max, 0.0
            )
            mxscale[layout.group_scale_rows(group, start, end)] = scale
        start = end
    return y, mxscale


def anti_mx_quant(
    codes: Tensor, mxscale: Tensor, axis: int, src_type: int, dtype: torch.dtype, packed_dim: int = -1
) -> Tensor:
    info = format_of(src_type, MX_FORMATS)
    if info.bits == 4:
        codes = layout.unpack_fp4(codes.transpose(packed_dim, -1)).transpose(packed_dim, -1)
        values = torch.tensor(code_values(info), device=codes.device)[codes.int()]
    else:
        values = codes.float()
    outer, n, inner = layout.collapse(values.shape, axis)
    blocks = -(-n // MX_BLOCK)
    byte = layout.deinterleave(mxscale.reshape(outer, -(-blocks // 2), inner, 2), blocks).to(torch.int32)
    scale = _power_of_two(byte.clamp(max=254) - 127).masked_fill(byte == E8M0_NAN, float("nan"))
    scale = scale.repeat_interleave(MX_BLOCK, dim=1)[:, :n]
    return (values.reshape(outer, n, inner) * scale).view(values.shape).to(dtype)
