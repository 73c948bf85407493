"""Packed weights, decoded by compressed-tensors, are to the bit what fake quantization gives."""

import math

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme

from mindspeed_lowp import ops
from mindspeed_lowp.export import MXFP4, MXFP8, ExportError
from mindspeed_lowp.ops.reference import mxfp4 as reference

from .models import assert_same_bits

FORMATS = [MXFP4(), MXFP8()]


def decode(packing, packed):
    scheme = preset_name_to_scheme(packing.preset, ["Linear"])
    return BaseCompressor.get_value_from_registry(packing.name).decompress(packed, scheme)["weight"]


def every_magnitude():
    """A block for each finite bf16 value, as its first element; the others are smaller, and of both signs."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite() & (values.abs() < 2.0**125)]
    others = torch.rand(len(values), 31, generator=torch.Generator().manual_seed(0)) * 2 - 1
    blocks = torch.cat([values.float()[:, None], others * values.float()[:, None]], dim=1)
    return blocks.bfloat16()


def test_mxfp4_is_what_fake_quantization_gives_for_every_magnitude():
    weight = every_magnitude()
    expected = reference.quant_dequant_mxfp4(weight, 6.0, 32)
    assert_same_bits(decode(MXFP4(), MXFP4().pack(weight)), expected)


def test_codes_and_scales_follow_the_rules_of_training():
    """By the rules written out: scale = 2 ** round(log2(amax / 6)), the nearest code, midpoints up."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = MXFP4().pack(weight)
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for row in range(64):
        for block in range(3):
            elements = weight[row, 32 * block : 32 * block + 32].tolist()
            exponent = round(math.log2(max(map(abs, elements)) / 6))
            assert packed["weight_scale"][row, block] == exponent + 127
            for i, element in enumerate(elements):
                scaled = abs(element) / 2.0**exponent
                code = min(range(8), key=lambda c: (abs(values[c] - scaled), -c))
                byte = int(packed["weight_packed"][row, 16 * block + i // 2])
                assert byte >> (4 * (i % 2)) & 0xF == code + 8 * (element < 0)


@pytest.mark.parametrize("scale_mode", ["round", "floor", "ceil"])
@pytest.mark.parametrize("scale_factor", [4.0, 5.37, 6.0, 100.0])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_other_rules_and_longer_blocks_are_exact_too(scale_mode, scale_factor, block_size):
    weight = every_magnitude()[::7][:9000].reshape(-1, 32 * 5)  # a tail in each row
    packing = MXFP4(scale_mode, scale_factor, block_size)
    expected = reference.quant_dequant_mxfp4(weight, scale_factor, block_size, scale_mode)
    assert_same_bits(decode(packing, packing.pack(weight)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_mxfp4_values_of_other_dtypes_are_exact_in_bf16(dtype):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight[0] *= 2.0**-14  # where fp16 has few bits left
    expected = reference.quant_dequant_mxfp4(weight.float(), 6.0, 32)
    assert_same_bits(decode(MXFP4(), MXFP4().pack(weight)), expected.bfloat16())
    assert torch.equal(expected.bfloat16().float(), expected)


@pytest.mark.parametrize("scale_mode", ["floor", "ceil"])
def test_mxfp8_is_what_the_recipe_multiplies(scale_mode):
    weight = every_magnitude()
    scale_alg = ["floor", "ceil"].index(scale_mode)
    codes, scale = ops.dynamic_mx_quant(weight, dst_type=torch.float8_e4m3fn, scale_alg=scale_alg)
    packing = MXFP8(scale_mode)
    assert_same_bits(decode(packing, packing.pack(weight)), ops.anti_mx_quant(codes, scale))


def test_the_sign_of_a_zero_is_kept():
    weight = torch.full((1, 32), -0.01).bfloat16()
    weight[0, :2] = torch.tensor([6.0, 0.01])
    decoded = decode(MXFP4(), MXFP4().pack(weight))
    assert decoded.signbit().tolist() == [[False, False, *[True] * 30]]
    assert decoded.count_nonzero() == 1


@pytest.mark.parametrize("packing", FORMATS, ids=lambda p: p.name)
def test_layout(packing):
    packed = packing.pack(torch.randn(5, 96).bfloat16())
    assert packed["weight_scale"].dtype == torch.uint8 and packed["weight_scale"].shape == (5, 3)
    codes = packed[packing.codes]
    assert codes.dtype == packing.element.dtype
    assert codes.shape == (5, 96 * packing.element.bits // 8)
    assert sum(tensor.nbytes for tensor in packed.values()) == packing.packed_bytes((5, 96))
    assert all(tensor.is_contiguous() for tensor in packed.values())


@pytest.mark.parametrize("packing", FORMATS, ids=lambda p: p.name)
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(2, 33), "rows of 33 elements; the format holds multiples of 32"),
        (torch.ones(2, 2, 32), "3 dimensions"),
        (torch.full((2, 32), torch.nan), "has NaN or Inf"),
        (torch.full((2, 32), torch.inf), "has NaN or Inf"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(packing, weight, message):
    with pytest.raises(ValueError, match=message):
        packing.pack(weight.bfloat16())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MXFP4(block_size=16), "--block-size 16: .* a scale for each 32 elements"),
        (lambda: MXFP4(scale_factor=0.0), "--scale-factor 0.0: give a number greater than 0"),
        (lambda: MXFP4(scale_mode="up"), "--scale-mode up: .* round or floor or ceil"),
        (lambda: MXFP8("round"), "--scale-mode round: .* floor or ceil"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_the_name_of_its_flag(make, message):
    with pytest.raises(ExportError, match=message):
        make()
