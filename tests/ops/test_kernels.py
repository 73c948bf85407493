"""The C++ kernels equal the reference to the last bit, at every CPU level that runs here."""

import pytest
import torch

from mindspeed_lowp.formats import E1M2, E2M1, E4M3, E5M2, MXFP4_FORMATS
from mindspeed_lowp.ops import kernels, layout
from mindspeed_lowp.ops.kernels import mx
from mindspeed_lowp.ops.reference import mx as reference
from tests.ops.data import (
    ALGORITHMS,
    FLOATS,
    FLOATS_AND_FP32,
    FORMATS,
    assert_same_bytes,
    cpu_level,
    normal,
    wide_range,
)

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")

SHAPES = [
    (1,),
    (33,),
    (1, 1),
    (64, 64),
    (100, 70),
    (33, 2050),
    (130, 31),
    (5, 3, 7),
    (2, 40, 3, 5),
    (0, 5),
    (5, 0),
]


@pytest.fixture(params=[cpu_level(level) for level in kernels.LEVELS])
def level(request):
    """Kernels of one level for the duration of a test."""
    kernels.use_level(request.param)
    yield request.param
    kernels.use_level(kernels.supported_levels()[0])


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_all_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert_same_bytes(a, e)


def sample(shape, dtype):
    x = wide_range(shape, dtype)
    if x.numel() > 40:
        x.view(-1)[7], x.view(-1)[-1] = float("nan"), float("-inf")
    return x


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_single_axis(level, dtype, info, alg):
    for shape in SHAPES:
        x = sample(shape, dtype)
        for axis in range(len(shape)):
            arguments = (x, axis, info.npu_code, "rint", 32, alg, 0.0, 0.0)
            assert_all_same(mx.dynamic_mx_quant(*arguments), reference.dynamic_mx_quant(*arguments))


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dual_axis(level, dtype, info, alg):
    for shape in SHAPES[2:]:
        arguments = (sample(shape, dtype), info.npu_code, "rint", alg, 0.0)
        assert_all_same(
            mx.dynamic_mx_quant_with_dual_axis(*arguments),
            reference.dynamic_mx_quant_with_dual_axis(*arguments),
        )


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_grouped(level, dtype, info, alg):
    for columns in (1, 70, 1030):
        x = sample((200, columns), dtype)
        for ends in ([200], [0, 200], [0, 0, 31, 31, 96, 160, 200, 200], [1, 2, 3, 200]):
            arguments = (x, torch.tensor(ends), info.npu_code, "rint", alg, 0.0)
            assert_all_same(
                mx.grouped_dynamic_mx_quant(*arguments), reference.grouped_dynamic_mx_quant(*arguments)
            )


FP4 = [pytest.param(info, id=info.name) for info in MXFP4_FORMATS]
#: scale_alg and dst_type_max.
FP4_SCALES = {E2M1: [(0, 0.0), (2, 0.0), (2, 7.0), (2, 9.5)], E1M2: [(0, 0.0), (2, 1.875), (2, 0.0)]}
ROUND_MODES = ["rint", "round", "floor"]


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("info", FP4)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_fp4(level, dtype, info, round_mode):
    """All quantizers; the reference takes any `scale_alg`."""
    for shape in ((2,), (34,), (64, 64), (100, 70), (33, 2050), (2, 40, 3, 6), (0, 6), (6, 0)):
        x = sample(shape, dtype)
        for alg, dst_type_max in FP4_SCALES[info]:
            rest = (info.npu_code, round_mode, alg, dst_type_max)
            for axis in range(len(shape)):
                arguments = (x, axis, *rest[:2], 32, *rest[2:], 0.0)
                assert_all_same(mx.dynamic_mx_quant(*arguments), reference.dynamic_mx_quant(*arguments))
            if len(shape) == 2 and dtype != torch.float32:
                assert_all_same(
                    mx.dynamic_mx_quant_with_dual_axis(x, *rest),
                    reference.dynamic_mx_quant_with_dual_axis(x, *rest),
                )
                ends = torch.tensor([0, shape[0] // 3, shape[0] // 3, shape[0]])
                assert_all_same(
                    mx.grouped_dynamic_mx_quant(x, ends, *rest),
                    reference.grouped_dynamic_mx_quant(x, ends, *rest),
                )


@pytest.mark.parametrize("round_mode", ROUND_MODES)
@pytest.mark.parametrize("info", FP4)
def test_every_bf16_pattern_to_fp4_under_ordinary_and_tiny_scales(level, info, round_mode):
    """Columns are all patterns of a sign and an exponent; rows, the scales around."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    x = x.unsqueeze(1).repeat(1, 7, 1)
    for i, factor in enumerate((0.25, 0.5, 1.0, 2.0, 8.0, 2.0**60, 2.0**-60)):
        x[:, i, ::32] = x[:, i, 1::32] * factor
    x = x.reshape(-1, 128)
    for axis, tensor in ((1, x), (0, x.t().contiguous())):
        arguments = (tensor, axis, info.npu_code, round_mode, 32, 0, 0.0, 0.0)
        assert_all_same(mx.dynamic_mx_quant(*arguments), reference.dynamic_mx_quant(*arguments))


@pytest.mark.parametrize("block_size", [64, 96, 1024])
@pytest.mark.parametrize("dtype", FLOATS)
def test_longer_blocks(level, dtype, block_size):
    for shape in ((2, 2300), (1100, 6), (2, 130, 3, 2)):
        x = sample(shape, dtype)
        for axis in range(len(shape)):
            for rest in ((E5M2, "rint", 1, 0.5), (E4M3, "rint", 0, 0.0), (E2M1, "floor", 0, 0.0)):
                info, round_mode, alg, bound = rest
                arguments = (x, axis, info.npu_code, round_mode, block_size, alg, 0.0, bound)
                assert_all_same(mx.dynamic_mx_quant(*arguments), reference.dynamic_mx_quant(*arguments))


@pytest.mark.parametrize("info", [*FORMATS, *FP4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tiles(level, dtype, info):
    for shape in ((1, 2), (64, 64), (100, 70), (33, 2050), (3, 40, 34)):
        tiny = normal(shape, dtype) * (2.0**-20 if dtype == torch.float16 else 2.0**-124)
        for x in (sample(shape, dtype), tiny, normal(shape, dtype)):
            for round_mode in ROUND_MODES if info.bits == 4 else ["rint"]:
                for alg, dst_type_max in [(0, 0.0), (2, 7.0)] if info == E2M1 else [(0, 0.0)]:
                    arguments = (x, info.npu_code, round_mode, alg, dst_type_max)
                    assert_all_same(
                        mx.dynamic_block_mx_quant(*arguments), reference.dynamic_block_mx_quant(*arguments)
                    )


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
def test_matrices_of_one_magnitude(level, info, alg):
    """Every exponent once: the bf16 kernels have a faster way for scales far from both ends of the range."""
    significands = normal((40, 71))
    significands[:, 5:37] *= 2.0**-6
    significands[:, [3, 40]] = 0.0
    x = (significands.double() * torch.exp2(torch.arange(-133.0, 126.0)).view(-1, 1, 1)).bfloat16()
    assert x.isfinite().all()
    arguments = (x, info.npu_code, "rint", alg, 0.0)
    assert_all_same(
        mx.dynamic_mx_quant_with_dual_axis(*arguments),
        reference.dynamic_mx_quant_with_dual_axis(*arguments),
    )


def test_threads_change_nothing(level, threads):
    """Large enough to be split; a number of rows that no split divides."""
    x = normal((1031, 1100))
    for axis in (0, 1):
        arguments = (x, axis, E4M3.npu_code, "rint", 32, 0, 0.0, 0.0)
        assert_all_same(mx.dynamic_mx_quant(*arguments), reference.dynamic_mx_quant(*arguments))
    arguments = (x, E4M3.npu_code, "rint", 0, 0.0)
    dual = mx.dynamic_mx_quant_with_dual_axis(*arguments)
    assert_all_same(dual, reference.dynamic_mx_quant_with_dual_axis(*arguments))
    for codes, mxscale, axis in ((*dual[:2], 1), (*dual[2:], 0)):
        arguments = (codes, mxscale, axis, E4M3.npu_code, torch.float32)
        assert_same_bytes(mx.anti_mx_quant(*arguments), reference.anti_mx_quant(*arguments))
    arguments = (x, torch.tensor([0, 500, 777, 777, 1031]), E4M3.npu_code, "rint", 0, 0.0)
    assert_all_same(mx.grouped_dynamic_mx_quant(*arguments), reference.grouped_dynamic_mx_quant(*arguments))
    arguments = (x, E2M1.npu_code, "floor", 2, 6.0)
    y, scale1, scale2 = mx.dynamic_block_mx_quant(*arguments)
    assert_all_same((y, scale1, scale2), reference.dynamic_block_mx_quant(*arguments))
    for scale, axis in ((scale1, 1), (scale2, 0)):
        arguments = (y, scale, axis, E2M1.npu_code, torch.bfloat16)
        assert_same_bytes(mx.anti_mx_quant(*arguments), reference.anti_mx_quant(*arguments))


def assert_same_values(actual, expected):
    """Same bits, except that one NaN is as good as another."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_same_bytes(actual.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
@pytest.mark.parametrize("info", FORMATS)
def test_dequantization_of_every_code_under_every_scale(level, info, dtype):
    codes = torch.arange(256).to(torch.uint8).expand(256 * 32, 256).contiguous().view(info.dtype)
    byte = torch.arange(256).to(torch.uint8)
    mxscale = layout.interleave(byte.view(1, 256, 1).expand(1, 256, 256).contiguous())[0]
    expected = reference.anti_mx_quant(codes, mxscale, 0, info.npu_code, dtype)
    assert_same_values(mx.anti_mx_quant(codes, mxscale, 0, info.npu_code, dtype), expected)
    actual = mx.anti_mx_quant(
        codes.t().contiguous(), mxscale.transpose(0, 1).contiguous(), 1, info.npu_code, dtype
    )
    assert_same_values(actual.t(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (64, 64), (33, 300), (200, 37), (40, 1), (1, 40)], ids=str)
def test_dequantization_reads_any_layout_in_place(level, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator)
    for axis in (0, 1):
        mxscale = torch.randint(
            90, 160, layout.scale_shape(shape, axis), dtype=torch.uint8, generator=generator
        )
        expected = reference.anti_mx_quant(raw.view(torch.float8_e4m3fn), mxscale, axis, E4M3.npu_code, dtype)
        wide = torch.nn.functional.pad(raw, (3, 5, 1, 1))[1:-1, 3:-5]
        tall = torch.nn.functional.pad(raw.t(), (3, 5, 1, 1))[1:-1, 3:-5].t()
        strided = raw.repeat_interleave(2, dim=1)[:, ::2]
        for codes in (raw, raw.t().contiguous().t(), wide, tall, strided):
            for scales in (mxscale, mxscale.transpose(0, 1).contiguous().transpose(0, 1)):
                actual = mx.anti_mx_quant(codes.view(torch.float8_e4m3fn), scales, axis, E4M3.npu_code, dtype)
                assert_same_bytes(actual, expected)


@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
@pytest.mark.parametrize("info", FP4)
def test_dequantization_of_every_fp4_pair_under_every_scale(level, info, dtype):
    codes = torch.arange(256).to(torch.uint8).expand(256 * 32, 256).contiguous()
    byte = torch.arange(256).to(torch.uint8)
    mxscale = layout.interleave(byte.view(1, 256, 1).expand(1, 256, 512).contiguous())[0]
    expected = reference.anti_mx_quant(codes, mxscale, 0, info.npu_code, dtype)
    assert_same_values(mx.anti_mx_quant(codes, mxscale, 0, info.npu_code, dtype), expected)
    turned = (codes.t(), mxscale.transpose(0, 1))  # packed along its columns now
    actual = mx.anti_mx_quant(*turned, 1, info.npu_code, dtype, packed_dim=0)
    assert_same_values(actual.t(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 2), (2, 3), (64, 64), (34, 300), (200, 38), (40, 2)], ids=str)
def test_dequantization_reads_any_layout_of_fp4(level, shape, dtype):
    generator = torch.Generator().manual_seed(0)
    for packed_dim in (0, 1):
        if shape[packed_dim] % 2:
            continue
        size = [n // 2 if dim == packed_dim else n for dim, n in enumerate(shape)]
        raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        for axis in (0, 1):
            scale_shape = layout.scale_shape(shape, axis)
            mxscale = torch.randint(90, 160, scale_shape, dtype=torch.uint8, generator=generator)
            arguments = (mxscale, axis, E2M1.npu_code, dtype, packed_dim)
            expected = reference.anti_mx_quant(raw, *arguments)
            assert expected.shape == shape
            wide = torch.nn.functional.pad(raw, (3, 5, 1, 1))[1:-1, 3:-5]
            tall = torch.nn.functional.pad(raw.t(), (3, 5, 1, 1))[1:-1, 3:-5].t()
            strided = raw.repeat_interleave(2, dim=1)[:, ::2]
            for codes in (raw, raw.t().contiguous().t(), wide, tall, strided):
                assert_same_bytes(mx.anti_mx_quant(codes, *arguments), expected)


def test_dequantization_of_more_dimensions(level):
    x = normal((2, 70, 3, 40))
    for axis in range(4):
        codes, mxscale = reference.dynamic_mx_quant(x, axis, E4M3.npu_code, "rint", 32, 0, 0.0, 0.0)
        arguments = (codes, mxscale, axis, E4M3.npu_code, torch.float32)
        assert_same_bytes(mx.anti_mx_quant(*arguments), reference.anti_mx_quant(*arguments))
        codes, mxscale = reference.dynamic_mx_quant(x, axis, E1M2.npu_code, "rint", 32, 0, 0.0, 0.0)
        arguments = (codes, mxscale, axis, E1M2.npu_code, torch.float16)
        assert_same_bytes(mx.anti_mx_quant(*arguments), reference.anti_mx_quant(*arguments))


def test_an_unknown_level_is_refused():
    with pytest.raises(
        ValueError, match=r"CPU level 'v9' \(LOWP_CPU_LEVEL\) is not supported here; use .*base"
    ):
        kernels.use_level("v9")
