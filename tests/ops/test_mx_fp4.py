"""MXFP4, `scale_alg` 2, longer blocks and tiles, against a transcription of the formulas in float64."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, FP4_VALUES, MX_FORMATS, FormatInfo
from mindspeed_lowp.ops import layout
from tests.ops.data import FLOATS, FLOATS_AND_FP32, FORMATS, assert_same_bytes, normal, wide_range

FP4 = [pytest.param(info, id=info.name) for info in (E2M1, E1M2)]
ALL_FORMATS = [pytest.param(info, id=info.name) for info in MX_FORMATS]
ROUND_MODES = ["rint", "round", "floor"]
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def unpacked(y: Tensor) -> Tensor:
    return layout.unpack_fp4(y)


# ---- a transcription ----


def scale_exponent(amax: float, info: FormatInfo, alg: int, dst_type_max: float) -> int | None:
    """The exponent of a block's scale, from -127 to 127; None where the block is not finite."""
    if not math.isfinite(amax):
        return None
    if amax == 0:
        return -127
    fraction, exponent = math.frexp(amax)  # 0.5 <= fraction < 1
    exponent -= 1
    limit = dst_type_max or info.max
    if alg == 0:
        exponent -= info.emax
    elif limit in (6.0, 7.0, 1.875):
        fraction, exponent = math.frexp(float(torch.tensor(amax).bfloat16()))
        exponent -= 1
        if exponent < -126:
            return -127
        exponent += (2 * fraction > {6.0: 1.5, 7.0: 1.75, 1.875: 1.875}[limit]) - info.emax
    else:
        quotient = float(np.float32(amax) / np.float32(limit))
        if quotient < 2.0**-126:
            return -127
        exponent = math.ceil(math.log2(quotient))
        exponent += (2.0**exponent < quotient) - (2.0 ** (exponent - 1) >= quotient)
    return min(max(exponent, -127), 127)


def fp4_code(value: float, info: FormatInfo, round_mode: str) -> int:
    """The code of a number, by distance from all eight values (float64, exact here)."""
    values = FP4_VALUES[info]
    magnitude = min(abs(value), info.max)
    negative = math.copysign(1.0, value) < 0
    if round_mode == "floor":
        code = (
            min(i for i in range(8) if values[i] >= magnitude)
            if negative
            else max(i for i in range(8) if values[i] <= magnitude)
        )
    else:
        distance = min(abs(v - magnitude) for v in values)
        nearest = [i for i in range(8) if abs(values[i] - magnitude) == distance]
        code = nearest[-1] if round_mode == "round" else min(nearest, key=lambda i: i % 2)
    return code + 8 * negative


def transcription(x: Tensor, info: FormatInfo, round_mode: str, alg: int, dst_type_max: float):
    """Codes (one a byte) and scale bytes of blocks ``[n, length]``."""
    codes, scales = [], []
    for line in x.double().tolist():
        amax = float("nan") if any(map(math.isnan, line)) else max(map(abs, line))
        exponent = scale_exponent(amax, info, alg, dst_type_max)
        scales.append(0xFF if exponent is None else exponent + 127)
        codes.append([0 if exponent is None else fp4_code(v / 2.0**exponent, info, round_mode) for v in line])
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8)


SCALES_OF_E2M1 = [(0, 0.0), (2, 0.0), (2, 6.0), (2, 7.0), (2, 6.5), (2, 12.0)]
SCALES_OF_E1M2 = [(0, 0.0), (2, 0.0), (2, 1.875), (2, 3.5)]


def quantize_lines(x: Tensor, info: FormatInfo, round_mode: str, alg: int, dst_type_max: float):
    """Blocks ``[n, up to 32]``; E1M2 with `scale_alg` 2 is had from the grouped operator only."""
    arguments = {"round_mode": round_mode, "scale_alg": alg, "dst_type_max": dst_type_max}
    arguments["dst_type"] = info.npu_code
    if info == E1M2 and alg == 2:
        padded = torch.nn.functional.pad(x, (0, 0, 0, len(x) % 2)).t().contiguous()
        y, mxscale = ops.grouped_dynamic_mx_quant(padded, torch.tensor([len(padded)]), **arguments)
        return unpacked(y).t()[: len(x)], mxscale[0, : len(x), 0]
    y, mxscale = ops.dynamic_mx_quant(x, **arguments)
    return unpacked(y), mxscale[:, 0, 0]


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize(
    ("info", "alg", "dst_type_max"),
    [(E2M1, *s) for s in SCALES_OF_E2M1] + [(E1M2, *s) for s in SCALES_OF_E1M2],
    ids=lambda value: getattr(value, "name", value),
)
def test_blocks_of_every_magnitude_equal_the_transcription(info, alg, dst_type_max, round_mode):
    """Each bf16 exponent with the significands around every carry, NaN, Inf, zeros and subnormals."""
    significands = torch.tensor(
        [0, 1, 0x20, 0x3F, 0x40, 0x41, 0x48, 0x5F, 0x60, 0x61, 0x6F, 0x70, 0x71, 0x7F]
    )
    amax = (torch.arange(256)[:, None] * 128 + significands).flatten().to(torch.int16).view(torch.bfloat16)
    fractions = torch.tensor([1.0, -0.9, 0.625, -0.42, 0.21, -0.125, 0.05, -1e-3, 0.0, -0.0, 1e-30, -1e-30])
    x = (amax.float()[:, None] * fractions).bfloat16()
    x[:, 0] = amax
    codes, scales = transcription(x, info, round_mode, alg, dst_type_max)
    actual, byte = quantize_lines(x, info, round_mode, alg, dst_type_max)
    assert_same_bytes(byte, scales)
    assert_same_bytes(actual, codes)


@pytest.mark.parametrize(("alg", "dst_type_max"), SCALES_OF_E2M1)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_random_blocks_equal_the_transcription(dtype, alg, dst_type_max):
    x = wide_range((200, 32), dtype)
    for round_mode in ROUND_MODES:
        codes, scales = transcription(x, E2M1, round_mode, alg, dst_type_max)
        actual, byte = quantize_lines(x, E2M1, round_mode, alg, dst_type_max)
        assert_same_bytes(byte, scales)
        assert_same_bytes(actual, codes)


# ---- elements ----


@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
@pytest.mark.parametrize("info", FP4)
def test_each_code_and_each_midpoint_in_each_round_mode(info, dtype):
    values = FP4_VALUES[info]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    x = torch.zeros(2, 32)
    x[:, 0] = values[-1]  # fixes the scale at 1
    x[0, 1:16] = torch.tensor([*values, *middles])
    x[0, 16:31] = -x[0, 1:16]
    x[1, 1:8] = torch.tensor(middles).nextafter(torch.tensor(0.0)) if dtype == torch.float32 else 0.0
    expected = {
        "rint": [0, 2, 2, 4, 4, 6, 6],
        "round": [1, 2, 3, 4, 5, 6, 7],
        "floor": [0, 1, 2, 3, 4, 5, 6],
    }
    for round_mode, ties in expected.items():
        y, mxscale = ops.dynamic_mx_quant(x.to(dtype), dst_type=info.npu_code, round_mode=round_mode)
        codes = unpacked(y)
        assert mxscale[:, 0, 0].tolist() == [127, 127]
        assert codes[0, 1:16].tolist() == [*range(8), *ties]
        down = range(1, 8) if round_mode == "floor" else ties
        assert codes[0, 16:31].tolist() == [8 + code for code in (*range(8), *down)]
        if dtype == torch.float32:
            assert codes[1, 1:8].tolist() == list(range(7))


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("info", FP4)
def test_every_bf16_pattern_as_element_under_a_fixed_scale(info, round_mode):
    finite = ALL_BF16[ALL_BF16.abs() <= info.max]
    blocks = torch.nn.functional.pad(finite, (0, -len(finite) % 31)).view(-1, 31)
    blocks = torch.nn.functional.pad(blocks, (1, 0), value=info.max)
    y, mxscale = ops.dynamic_mx_quant(blocks, dst_type=info.npu_code, round_mode=round_mode)
    assert (mxscale[:, 0, 0] == 127).all()
    values = np.array(FP4_VALUES[info])
    x = blocks.double().numpy()
    magnitude = np.abs(x)
    if round_mode == "floor":
        code = np.where(
            x < 0,
            np.searchsorted(values, magnitude),
            np.searchsorted(values, magnitude, side="right") - 1,
        )
    else:
        step = np.where(magnitude >= 4, 2, np.where(magnitude >= 2, 1, 0.5)) if info == E2M1 else 0.25
        quotient = magnitude / step
        rounded = np.rint(quotient) if round_mode == "rint" else np.floor(quotient + 0.5)
        code = np.searchsorted(values, rounded * step)
    expected = torch.from_numpy((code + 8 * np.signbit(x)).astype(np.uint8))
    assert_same_bytes(unpacked(y), expected)


def test_the_first_element_stands_in_the_low_half():
    y, _ = ops.dynamic_mx_quant(torch.tensor([[6.0, -0.5, 1.0, 0.0]]).bfloat16())
    assert y.tolist() == [[0x97, 0x02]]


def test_the_largest_magnitudes_saturate_under_the_largest_scale():
    """E1M2 scales reach 2 ** 127, whose inverse is subnormal."""
    largest = torch.finfo(torch.bfloat16).max
    x = torch.tensor([[largest, -largest, 2.0**127, -(2.0**-100)]]).bfloat16()
    y, mxscale = ops.dynamic_mx_quant(x, dst_type=297, round_mode="floor")
    assert mxscale.flatten().tolist() == [254, 0]
    assert unpacked(y).tolist() == [[7, 15, 4, 9]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("info", FP4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_block_with_a_nonfinite_element_is_marked_and_no_other(dtype, info, bad):
    x = normal((64, 64), dtype)
    clean = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=info.npu_code)
    x[40, 5] = bad
    y1, mxscale1, y2, mxscale2 = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=info.npu_code)
    for y, before, rows, columns in (
        (y1, clean[0], slice(40, 41), slice(0, 32)),
        (y2, clean[2], slice(32, 64), slice(5, 6)),
    ):
        expected = unpacked(before)
        expected[rows, columns] = 0
        assert_same_bytes(unpacked(y), expected)
    assert (mxscale1 == 0xFF).nonzero().tolist() == [[40, 0, 0]]
    assert (mxscale2 == 0xFF).nonzero().tolist() == [[0, 5, 1]]
    values = ops.anti_mx_quant(y2, mxscale2, axis=0, dst_type=torch.float32, src_type=info.npu_code)
    assert values.isnan().nonzero().tolist() == [[row, 5] for row in range(32, 64)]


# ---- operators ----


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("info", FP4)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64, 64), (33, 96), (3, 40, 1100), (2, 3, 6), (0, 8), (7, 0)], ids=str)
def test_dual_axis_equals_two_single_axis_calls(shape, dtype, info, round_mode):
    x = wide_range(shape, dtype)
    how = {"dst_type": info.npu_code, "round_mode": round_mode}
    dual = ops.dynamic_mx_quant_with_dual_axis(x, **how)
    single = [*ops.dynamic_mx_quant(x, axis=-1, **how), *ops.dynamic_mx_quant(x, axis=-2, **how)]
    for actual, expected in zip(dual, single, strict=True):
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize("axis", range(7))
def test_any_axis_of_seven_dimensions(axis):
    shape = (2, 3, 1, 35, 2, 1, 6)
    x = wide_range(shape, torch.bfloat16)
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis)
    lines = x.movedim(axis, -1)
    lines = lines.reshape(-1, shape[axis])
    lines = torch.nn.functional.pad(lines, (0, shape[axis] % 2))
    wanted, wanted_scale = ops.dynamic_mx_quant(lines)
    wanted = unpacked(wanted)[:, : shape[axis]]
    assert_same_bytes(unpacked(y).movedim(axis, -1).reshape(-1, shape[axis]), wanted)
    assert_same_bytes(mxscale.movedim(axis, -2).reshape(wanted_scale.shape), wanted_scale)


@pytest.mark.parametrize("ends", [[200], [0, 1, 45, 45, 200]], ids=str)
@pytest.mark.parametrize(("info", "alg", "dst_type_max"), [(E2M1, 0, 0.0), (E2M1, 2, 7.0), (E1M2, 0, None)])
def test_each_group_is_quantized_by_itself(info, alg, dst_type_max, ends):
    x = wide_range((200, 70), torch.float16)
    how = {"dst_type": info.npu_code, "scale_alg": alg, "dst_type_max": dst_type_max, "round_mode": "floor"}
    y, mxscale = ops.grouped_dynamic_mx_quant(x, torch.tensor(ends), **how)
    assert (y.shape, mxscale.shape) == ((200, 35), (200 // 64 + len(ends), 70, 2))
    values = ops.grouped_anti_mx_quant(
        y, mxscale, torch.tensor(ends), dst_type=torch.float32, src_type=info.npu_code
    )
    how["dst_type_max"] = dst_type_max or 0.0
    start = 0
    for group, end in enumerate(ends):
        codes, scale = ops.dynamic_mx_quant(x[start:end], axis=0, **how)
        first = start // 64 + group
        assert_same_bytes(y[start:end], codes)
        assert_same_bytes(mxscale[first : first + len(scale)], scale)
        part = ops.anti_mx_quant(codes, scale, axis=0, dst_type=torch.float32, src_type=info.npu_code)
        assert_same_bytes(values[start:end], part)
        start = end


@pytest.mark.parametrize("block_size", [64, 96, 1024])
@pytest.mark.parametrize("info", ALL_FORMATS)
def test_longer_blocks_share_the_scale_of_their_largest_element(info, block_size):
    lines = (normal((6, 2 * block_size + 40)).double() * torch.exp2(torch.arange(6.0)[:, None])).bfloat16()
    amax = torch.stack([part.abs().amax(1) for part in lines.split(block_size, dim=1)], dim=1)
    byte = 127 + torch.frexp(amax.float())[1] - 1 - info.emax  # [6, 3]
    scale = torch.exp2(byte.double() - 127).repeat_interleave(block_size, 1)[:, : lines.shape[1]]
    scaled = (lines.double() / scale).clamp(-info.max, info.max).float()
    expected_scale = torch.nn.functional.pad(byte, (0, 1)).to(torch.uint8).view(6, 2, 2)
    cast = getattr(ops, f"cast_{info.name}")
    how = {"dst_type": info.npu_code, "block_size": block_size}
    y, mxscale = ops.dynamic_mx_quant(lines, **how)
    assert_same_bytes(mxscale, expected_scale)
    assert_same_bytes(y, cast(scaled))
    y, mxscale = ops.dynamic_mx_quant(lines.t(), axis=0, **how)
    assert_same_bytes(mxscale, expected_scale.transpose(0, 1).contiguous())
    assert_same_bytes(y, cast(scaled.t().contiguous()))


def test_a_longer_block_is_one_block():
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, 0], x[0, 40], x[0, 70] = 1.0, 64.0, 0.5
    y, mxscale = ops.dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn, block_size=64)
    assert mxscale.tolist() == [[[125, 118]]]
    assert y.float()[0, [0, 40, 70]].tolist() == [4.0, 256.0, 256.0]


def test_max_low_bound_raises_the_scale_of_small_blocks_only():
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[0, 0], x[1, 0] = 2.0**-20, 448.0
    how = {"dst_type": torch.float8_e4m3fn, "scale_alg": 1}
    assert ops.dynamic_mx_quant(x, **how)[1][:, 0, 0].tolist() == [99, 127, 0]
    y, mxscale = ops.dynamic_mx_quant(x, **how, max_low_bound=448 * 2.0**-10)
    assert mxscale[:, 0, 0].tolist() == [117, 127, 117]
    assert y.float()[:, 0].tolist() == [2.0**-10 // 2.0**-9 * 2.0**-9, 448.0, 0.0]
    y, mxscale = ops.dynamic_mx_quant(x, **how, max_low_bound=3e38)
    assert mxscale[:, 0, 0].tolist() == [247, 247, 247]
    assert not y.view(torch.uint8).any()


def test_dst_type_max_of_scale_alg_2_moves_the_carry():
    x = torch.zeros(4, 32, dtype=torch.bfloat16)
    x[:, 0] = torch.tensor([6.0, 6.03125, 7.0, 7.03125])
    for dst_type_max, bytes_ in ((0.0, [127, 128, 128, 128]), (6.0, [127, 128, 128, 128])):
        _, mxscale = ops.dynamic_mx_quant(x, scale_alg=2, dst_type_max=dst_type_max)
        assert mxscale[:, 0, 0].tolist() == bytes_
    y, mxscale = ops.dynamic_mx_quant(x, scale_alg=2, dst_type_max=7.0)
    assert mxscale[:, 0, 0].tolist() == [127, 127, 127, 128]
    assert unpacked(y)[:, 0].tolist() == [7, 7, 7, 6]
    _, mxscale = ops.dynamic_mx_quant(x, scale_alg=2, dst_type_max=12.0)
    assert mxscale[:, 0, 0].tolist() == [126, 127, 127, 127]


def test_scale_alg_2_looks_at_amax_in_bf16():
    """fp16 and fp32 magnitudes just above 6 round to it."""
    x = torch.zeros(1, 32)
    x[0, 0] = 6.01
    for dtype, byte in ((torch.float32, 127), (torch.float16, 127), (torch.bfloat16, 127)):
        assert ops.dynamic_mx_quant(x.to(dtype), scale_alg=2)[1][0, 0, 0] == byte
        assert ops.dynamic_mx_quant((x * 1.004).to(dtype), scale_alg=2)[1][0, 0, 0] == byte + 1


# ---- tiles ----


def tiles(x: Tensor, byte: Tensor) -> Tensor:
    """Each tile's byte (``[..., ceil(M / 32), ceil(K / 32)]``) at each of its elements."""
    return byte.repeat_interleave(32, -2).repeat_interleave(32, -1)[..., : x.shape[-2], : x.shape[-1]]


@pytest.mark.parametrize("info", ALL_FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64, 64), (33, 96), (2, 70, 34), (1, 2), (3, 1, 2100)], ids=str)
def test_tiles_share_a_scale_that_both_layouts_hold(shape, dtype, info):
    x = normal(shape, dtype)
    y, scale1, scale2 = ops.dynamic_block_mx_quant(x, dst_type=info.npu_code)
    m, k = shape[-2:]
    padded = torch.nn.functional.pad(x.float().abs(), (0, -k % 32, 0, -m % 32))
    amax = padded.unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32)).amax((-3, -1))
    byte = torch.where(amax == 0, 0, 127 + torch.frexp(amax)[1] - 1 - info.emax).to(torch.uint8)
    flat1 = scale1.flatten(-2)
    flat2 = scale2.transpose(-1, -2).flatten(-3, -2)
    blocks_m, blocks_k = byte.shape[-2:]
    assert_same_bytes(flat1[..., :blocks_k], byte.repeat_interleave(32, -2)[..., :m, :])
    assert_same_bytes(flat2[..., :blocks_m, :], byte.repeat_interleave(32, -1)[..., :k])
    assert not flat1[..., blocks_k:].any()
    assert not flat2[..., blocks_m:, :].any()
    along_rows = ops.anti_mx_quant(y, scale1, dst_type=torch.float32, src_type=info.npu_code)
    along_columns = ops.anti_mx_quant(y, scale2, axis=-2, dst_type=torch.float32, src_type=info.npu_code)
    assert_same_bytes(along_rows, along_columns)
    scaled = x.double() * torch.exp2(127 - tiles(x, byte).double())
    cast = getattr(ops, f"cast_{info.name}")(scaled.clamp(-info.max, info.max).float())
    assert_same_bytes(y, cast)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("info", [E4M3, E2M1], ids=lambda info: info.name)
def test_a_tile_with_a_nonfinite_element_is_marked_and_no_other(info, bad):
    x = normal((64, 64))
    clean = ops.dynamic_block_mx_quant(x, dst_type=info.npu_code)
    x[40, 5] = bad
    y, scale1, scale2 = ops.dynamic_block_mx_quant(x, dst_type=info.npu_code)
    assert (scale1 == 0xFF).nonzero().tolist() == [[row, 0, 0] for row in range(32, 64)]
    assert (scale2 == 0xFF).nonzero().tolist() == [[0, column, 1] for column in range(32)]
    expected = clean[0].view(torch.uint8).clone()
    expected[32:, : 32 * info.bits // 8] = 0
    assert_same_bytes(y.view(torch.uint8), expected)


@pytest.mark.parametrize("info", ALL_FORMATS)
def test_tiles_take_bf16_subnormals_as_zeros_of_their_sign(info):
    x = torch.full((32, 32), 2.0**-120).bfloat16()
    x[0, 0], x[1, 1] = 2.0**-127, -(2.0**-127)
    x[2, 2] = 2.0**-126
    y, scale1, _ = ops.dynamic_block_mx_quant(x, dst_type=info.npu_code, round_mode="rint")
    assert scale1[0, 0, 0] == max(7 - info.emax, 0)
    codes = unpacked(y) if info.bits == 4 else y.view(torch.uint8)
    assert codes[0, 0] == 0
    assert codes[1, 1] == 1 << (info.bits - 1)
    reachable = 2.0**-126 / 2.0 ** (scale1[0, 0, 0].item() - 127)
    assert (codes[2, 2] > 0) == (reachable > info.smallest / 2)
    whole, _ = ops.dynamic_mx_quant(x, dst_type=info.npu_code)  # not a tile: nothing is flushed
    assert (whole.view(torch.uint8) != y.view(torch.uint8)).any() == (info in (E4M3, E5M2))


def test_tiles_carry_as_scale_alg_2_does():
    x = torch.zeros(64, 32, dtype=torch.bfloat16)
    x[0, 0], x[32, 31] = 6.0, -6.03125
    _, scale1, _ = ops.dynamic_block_mx_quant(x, scale_alg=2, dst_type_max=6.0)
    assert scale1[[0, 31, 32, 63], 0, 0].tolist() == [127, 127, 128, 128]
    _, scale1, _ = ops.dynamic_block_mx_quant(x, scale_alg=2, dst_type_max=7.0)
    assert scale1[[0, 31, 32, 63], 0, 0].tolist() == [127, 127, 127, 127]


# ---- the way back ----


@pytest.mark.parametrize("info", FP4)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_anti_mx_quant_returns_the_values(axis, dtype, info):
    x = normal((3, 40, 70))
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, dst_type=info.npu_code)
    byte = mxscale.movedim(axis, -2).flatten(-2).repeat_interleave(32, -1)[..., : x.shape[axis]]
    table = torch.tensor([*FP4_VALUES[info], *(-v for v in FP4_VALUES[info])], dtype=torch.double)
    expected = table[unpacked(y).int()] * torch.exp2(byte.movedim(-1, axis).double() - 127)
    actual = ops.anti_mx_quant(y, mxscale, axis=axis, dst_type=dtype, src_type=info.npu_code)
    assert_same_bytes(actual, expected.to(dtype))
    as_fp4 = y.view(torch.float4_e2m1fn_x2)
    if info == E2M1:
        assert_same_bytes(ops.anti_mx_quant(as_fp4, mxscale, axis=axis, dst_type=dtype), actual)


@pytest.mark.parametrize("info", FORMATS)
def test_fp8_codes_tell_their_format_themselves(info):
    y, mxscale = ops.dynamic_mx_quant(normal((4, 64)), dst_type=info.dtype)
    values = ops.anti_mx_quant(y, mxscale)
    assert_same_bytes(ops.anti_mx_quant(y, mxscale, src_type=E5M2.npu_code), values)
    assert_same_bytes(ops.anti_mx_quant(y, mxscale, src_type=E4M3.dtype), values)
