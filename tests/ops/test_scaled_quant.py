"""Quantization with fp32 scales: a numpy transcription of the documents, and C++ against the reference."""

import en_dtypes
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E4M3, E5M2, HIF8, INT8, FormatInfo
from mindspeed_lowp.ops import kernels
from mindspeed_lowp.ops.kernels import scaled
from mindspeed_lowp.ops.reference import scaled as reference
from tests.ops.data import FLOATS, FLOATS_AND_FP32, assert_same_bytes, cpu_level, normal, wide_range

FORMATS = [pytest.param(info, id=info.name) for info in (INT8, E4M3, E5M2, HIF8)]
MODES = ["pertoken", "perchannel", "pertensor"]
ORACLE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, HIF8: en_dtypes.hifloat8}
SHAPES = [(1, 1), (3, 70), (64, 513), (5, 3, 7), (2, 40, 3, 5), (2, 130, 260), (0, 5), (5, 0)]


def saturating_cast(value: np.ndarray, info: FormatInfo) -> Tensor:
    """The NPU's conversion: to nearest, Inf and overflow to the largest, NaN to +0."""
    lowest = -128 if info == INT8 else -info.max
    value = np.clip(np.nan_to_num(value, nan=0.0, posinf=np.inf, neginf=-np.inf), lowest, info.max)
    codes = np.rint(value).astype(np.int8) if info == INT8 else value.astype(ORACLE[info])
    return torch.from_numpy(codes.view(np.uint8))


@np.errstate(all="ignore")
def transcription(x: Tensor, info: FormatInfo, mode: str, largest: float, smooth: np.ndarray | float = 1.0):
    value = x.float().numpy() * np.float32(smooth)
    axis = {"pertoken": -1, "perchannel": -2, "pertensor": None}[mode]
    amax = np.max(np.abs(value), axis=axis, keepdims=True)
    scale = (amax * (np.float32(1) / np.float32(largest))).astype(np.float32)
    codes = saturating_cast(value / scale, info)
    return codes, torch.from_numpy(scale.reshape(1) if axis is None else scale.squeeze(axis))


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_same_bytes(actual[0].view(torch.uint8), expected[0].view(torch.uint8))
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=0, equal_nan=True)


def with_specials(x: Tensor) -> Tensor:
    if x.numel() > 40:
        x.view(-1)[7], x.view(-1)[-1] = float("nan"), float("-inf")
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_quant_is_the_documents(dtype, info, mode):
    for shape in SHAPES[:-2]:
        for x in (normal(shape, dtype), wide_range(shape, dtype), with_specials(normal(shape, dtype))):
            actual = ops.dynamic_quant(x, dst_type=info.npu_code, quant_mode=mode)
            assert actual[0].dtype == info.dtype
            assert_same(actual, transcription(x, info, mode, info.max))


@pytest.mark.parametrize("largest", [15.0, 56.0, 224.0, 1.0, 32768.0])
def test_the_largest_hifloat8_value_can_be_chosen(largest):
    x = normal((40, 300))
    for mode in MODES:
        y, scale = ops.dynamic_quant(x, dst_type=290, quant_mode=mode, dst_type_max=largest)
        assert_same((y, scale), transcription(x, HIF8, mode, largest))
        assert ops.decode_hifloat8(y).abs().max() == largest


@pytest.mark.parametrize("info", FORMATS)
def test_every_bf16_pattern_as_amax(info):
    """A multiplication by the rounded 1 / max, not a division; subnormal scales and what they saturate."""
    amax = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = (amax.float()[:, None] * torch.tensor([1.0, -0.97, 0.5, 0.26, -0.01, 0.0])).bfloat16()
    x[:, 0] = amax
    expected = transcription(x, info, "pertoken", info.max)
    assert_same(ops.dynamic_quant(x, dst_type=info.npu_code), expected)
    actual = ops.dynamic_quant(x.t(), dst_type=info.npu_code, quant_mode="perchannel")
    assert_same((actual[0].t(), actual[1]), expected)
    divided = amax.float().abs() / info.max
    if info in (INT8, E4M3, E5M2):
        assert (divided != expected[1])[amax.isfinite()].sum() > 1000


@pytest.mark.parametrize("info", FORMATS)
def test_zeros_nan_and_inf_of_dynamic_quant(info):
    x = torch.tensor([[0.0, -0.0, 0.0], [1.0, torch.nan, -2.0], [1.0, torch.inf, -2.0], [1.0, -1.0, 0.5]])
    y, scale = ops.dynamic_quant(x.bfloat16(), dst_type=info.npu_code)
    codes = y.view(torch.uint8).tolist()
    negative_zero = 0x80 if info in (E4M3, E5M2) else 0
    assert codes[0] == [0, 0, 0] and codes[1] == [0, 0, 0] and codes[2] == [0, 0, negative_zero]
    assert scale[0] == 0 and scale[1].isnan() and scale[2] == torch.inf and scale[3] > 0
    whole = ops.dynamic_quant(x.bfloat16(), dst_type=info.npu_code, quant_mode="pertensor")
    assert whole[1].isnan().all() and not whole[0].view(torch.uint8).any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_smooth_scales(dtype, mode):
    x = with_specials(wide_range((2, 60, 700), dtype))
    smooth = normal((60 if mode == "perchannel" else 700,), dtype, seed=1)
    factor = smooth.float().numpy()[:, None] if mode == "perchannel" else smooth.float().numpy()
    for info in (INT8, E4M3, E5M2, HIF8):
        actual = ops.dynamic_quant(x, smooth_scales=smooth, dst_type=info.npu_code, quant_mode=mode)
        assert_same(actual, transcription(x, info, mode, info.max, factor))


@pytest.mark.parametrize("ends", [[120], [0, 0, 31, 31, 120], [1, 2, 119, 120, 120]], ids=str)
def test_groups_of_rows_have_smooth_scales_of_their_own(ends):
    x, smooth = normal((2, 60, 70)), normal((len(ends), 70), seed=1)
    each = smooth.float().numpy().repeat(np.diff([0, *ends]), axis=0).reshape(x.shape)
    for dtype in (torch.int32, torch.int64):
        actual = ops.dynamic_quant(
            x, smooth_scales=smooth, group_index=torch.tensor(ends, dtype=dtype), dst_type=290
        )
        assert_same(actual, transcription(x, HIF8, "pertoken", HIF8.max, each))


@np.errstate(all="ignore")
def block_transcription(
    x: np.ndarray, info: FormatInfo, min_scale: float, block: tuple[int, int], largest: float
):
    rows, cols = x.shape
    codes = np.empty(x.shape, np.uint8)
    scale = np.empty((-(-rows // block[0]), -(-cols // block[1])), np.float32)
    for i, j in np.ndindex(*scale.shape):
        tile = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        amax = np.abs(np.where(np.isfinite(x[tile]), x[tile], np.float32(0))).max()
        scale[i, j] = amax / np.float32(largest)
        if min_scale:
            scale[i, j] = min(scale[i, j], np.float32(1 / min_scale))
        codes[tile] = saturating_cast(x[tile] / scale[i, j], info).numpy()
    return torch.from_numpy(codes), torch.from_numpy(scale)


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 64), (256, 192)], ids=str)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_dynamic_block_quant_is_the_documents(dtype, info, block):
    for x in (normal((150, 300), dtype), with_specials(wide_range((130, 129), dtype)), normal((1, 1), dtype)):
        for min_scale in (0.0, 100.0, 0.3):
            actual = ops.dynamic_block_quant(
                x,
                min_scale=min_scale,
                round_mode="round" if info == HIF8 else "rint",
                dst_type=info.npu_code,
                row_block_size=block[0],
                col_block_size=block[1],
            )
            assert actual[0].dtype == info.dtype
            assert_same(actual, block_transcription(x.float().numpy(), info, min_scale, block, info.max))


def test_tiles_of_a_batch_and_a_chosen_largest_value():
    x = normal((3, 200, 140))
    for largest in (15.0, 56.0, 224.0, 32768.0):
        y, scale = ops.dynamic_block_quant(
            x, round_mode="round", dst_type=290, row_block_size=128, dst_type_max=largest
        )
        assert scale.shape == (3, 2, 2)
        for b in range(3):
            expected = block_transcription(x[b].float().numpy(), HIF8, 0.0, (128, 128), largest)
            assert_same((y[b], scale[b]), expected)


def test_tiles_keep_to_their_finite_elements():
    x = torch.zeros(2, 256)
    x[0, :3] = torch.tensor([torch.nan, -torch.inf, 2.0])
    y, scale = ops.dynamic_block_quant(x, dst_type=torch.float8_e4m3fn)
    assert torch.equal(scale, torch.tensor([[2.0 / 448, 0.0], [0.0, 0.0]]))
    assert y[0, :4].view(torch.uint8).tolist() == [0, 0xFE, 0x7E, 0]
    assert not y[0, 4:].view(torch.uint8).any() and not y[1].view(torch.uint8).any()


@np.errstate(all="ignore")
def quantize_transcription(x, scales, zero_points, info, axis, div_mode):
    shape = [1] * x.dim()
    shape[axis] = -1
    scales = scales.float().numpy().reshape(shape)
    value = x.float().numpy() / scales if div_mode else x.float().numpy() * scales
    if zero_points is not None:
        value = value + zero_points.float().numpy().reshape(shape)
    return saturating_cast(value, info)


@pytest.mark.parametrize("div_mode", [True, False])
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_quantize_is_the_documents(dtype, info, div_mode):
    for shape in ((70,), (33, 140), (5, 40, 3), (3, 7, 600)):
        x = with_specials(normal(shape, dtype) * 40)
        for axis in range(max(0, 0 if div_mode else len(shape) - 2), len(shape)):
            for n in {1, shape[axis]}:
                scales = normal((n,), torch.float32, seed=1).to(torch.float32 if div_mode else dtype)
                scales[-1] = 0.01
                offsets = [None, normal((n,), scales.dtype, seed=2) * 3]
                if div_mode:
                    offsets.append(torch.arange(n).to(torch.int32) - 3)
                for zero_points in offsets:
                    last = axis == len(shape) - 1
                    given = axis if div_mode else 1 if last else -2
                    y = ops.quantize(x, scales, zero_points, info.npu_code, given, div_mode)
                    assert y.dtype == info.dtype
                    expected = quantize_transcription(x, scales, zero_points, info, axis, div_mode)
                    assert_same_bytes(y.view(torch.uint8), expected)


@pytest.mark.parametrize("info", FORMATS)
def test_quantize_saturates_and_drops_nan(info):
    x = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 0.0, 0.5])
    lowest = -128.0 if info == INT8 else -info.max
    y = ops.quantize(x, torch.ones(1), None, info.npu_code)
    values = ops.decode_hifloat8(y) if info == HIF8 else y.float()
    assert values.tolist()[:6] == [info.max, lowest, info.max, lowest, 0.0, 0.0]
    y = ops.quantize(x, torch.zeros(1), None, info.npu_code)  # 0 / 0 too
    values = ops.decode_hifloat8(y) if info == HIF8 else y.float()
    assert values.tolist()[5:] == [0.0, info.max]


@pytest.fixture(params=[cpu_level(level) for level in kernels.LEVELS])
def level(request):
    kernels.use_level(request.param)
    yield request.param
    kernels.use_level(kernels.supported_levels()[0])


needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")


def layouts(x: Tensor) -> list[Tensor]:
    """The same values contiguous, as a misaligned view and transposed in memory."""
    wide = torch.nn.functional.pad(x, (1, 2))[..., 1:-2]
    return [x, wide, x.transpose(-1, -2).contiguous().transpose(-1, -2)]


@needs_kernels
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_quant_kernels_equal_the_specification(level, dtype, info):
    for shape in SHAPES:
        sample = with_specials(wide_range(shape, dtype))
        for x in layouts(sample) if sample.numel() else [sample]:
            for mode in MODES:
                n = shape[-2] if mode == "perchannel" else shape[-1]
                for smooth in (None, normal((n,), dtype, seed=3)):
                    arguments = (x, smooth, None, info.npu_code, mode, 15.0 if info == HIF8 else 0.0)
                    actual, expected = scaled.dynamic_quant(*arguments), reference.dynamic_quant(*arguments)
                    assert_same_bytes(actual[0], expected[0])
                    assert_same_bytes(actual[1], expected[1])


@needs_kernels
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_block_and_static_kernels_equal_the_specification(level, dtype, info):
    for shape in ((3, 70), (2, 130, 260), (64, 513), (0, 5), (5, 0)):
        sample = with_specials(wide_range(shape, dtype))
        for x in layouts(sample) if sample.numel() else [sample]:
            for block in ((1, 128), (128, 128)):
                arguments = (x, 0.5, info.npu_code, *block, 0.0)
                actual, expected = (
                    scaled.dynamic_block_quant(*arguments),
                    reference.dynamic_block_quant(*arguments),
                )
                assert_same_bytes(actual[0], expected[0])
                assert_same_bytes(actual[1], expected[1])
            for axis in range(len(shape)):
                for n in {1, shape[axis]}:
                    scales, offsets = normal((n,), torch.float32), normal((n,), torch.float32, seed=1)
                    for zero_points in (None, offsets):
                        for divide in (True, False):
                            arguments = (x, scales, zero_points, info.npu_code, axis, divide)
                            assert_same_bytes(scaled.quantize(*arguments), reference.quantize(*arguments))


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_threads_and_the_table_of_large_tensors_change_nothing(dtype, info, set_threads):
    """Large enough to be split and for codes to be looked up; rows that no split divides."""
    x, code = normal((701, 801), dtype), info.npu_code
    calls = [("dynamic_block_quant", (x, 0.0, code, 128, 128, 0.0))]
    if dtype != torch.float32:
        calls += [("dynamic_quant", (x, None, None, code, mode, 0.0)) for mode in MODES]
    for zero_points in (None, torch.tensor([3])):
        calls.append(
            ("quantize", (with_specials(x.clone()), torch.tensor([0.01]), zero_points, code, 0, True))
        )
    for name, arguments in calls:
        expected = getattr(reference, name)(*arguments)
        for level in kernels.supported_levels():
            kernels.use_level(level)
            for threads in (1, 2):
                set_threads(threads)
                actual = getattr(scaled, name)(*arguments)
                if isinstance(expected, Tensor):
                    assert_same_bytes(actual, expected)
                else:
                    assert_same(actual, expected)
    kernels.use_level(kernels.supported_levels()[0])


X = torch.zeros(4, 256, dtype=torch.bfloat16)
ENDS = torch.tensor([2, 4])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X.float()}, r"x has dtype torch.float32; use torch.bfloat16 or torch.float16"),
        ({"x": X[0]}, r"x has 1 dimensions; 2 to 8 are supported"),
        ({"dst_type": 296}, r"dst_type=296 is not supported; use int8 .* hif8 \(290\)"),
        ({"quant_mode": "pergroup"}, r"quant_mode='pergroup' is not supported; use 'pertoken'"),
        ({"dst_type_max": 15.0}, r"dst_type_max=15.0 is not supported for int8; only HiFloat8"),
        ({"dst_type": 290, "dst_type_max": -1.0}, r"dst_type_max=-1.0 is out of range; use 0.0 to 32768"),
        ({"smooth_scales": X[0].float()}, r"smooth_scales has dtype torch.float32; use torch.bfloat16"),
        ({"smooth_scales": X[0, :9]}, r"smooth_scales has shape \[9\], expected \[256\] \(x's axis -1"),
        ({"smooth_scales": X[0], "quant_mode": "perchannel"}, r"expected \[4\] \(x's axis -2, perchannel\)"),
        ({"group_index": ENDS}, r"group_index is supported only with smooth_scales"),
        (
            {"group_index": ENDS, "smooth_scales": X[:2], "quant_mode": "pertensor"},
            r"group_index is supported only with smooth_scales and quant_mode='pertoken', not 'pertensor'",
        ),
        (
            {"group_index": ENDS, "smooth_scales": X[:3]},
            r"smooth_scales has shape \[3, 256\], expected \[2, 256\]",
        ),
        ({"group_index": ENDS[:0], "smooth_scales": X[:0]}, r"group_index has 0 groups; use 1 to 1024"),
        ({"group_index": ENDS - 1, "smooth_scales": X[:2]}, r"group_index=\[1, 3\] must end with .* 4"),
        (
            {"group_index": ENDS.flip(0), "smooth_scales": X[:2]},
            r"group_index=\[4, 2\]: ends must not decrease",
        ),
        ({"group_index": ENDS.float(), "smooth_scales": X[:2]}, r"group_index has dtype torch.float32"),
    ],
)
def test_dynamic_quant_names_what_it_refuses(arguments, message):
    arguments = {"x": X} | arguments
    with pytest.raises(ValueError, match=message):
        ops.dynamic_quant(arguments.pop("x"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X.double()}, r"x has dtype torch.float64"),
        ({"x": X[None, None]}, r"x has 4 dimensions; 2 to 3 are supported"),
        ({"dst_type": 290}, r"round_mode='rint' is not supported with hif8; use 'round'"),
        ({"round_mode": "round"}, r"round_mode='round' is not supported with int8; use 'rint'"),
        ({"row_block_size": 64}, r"row_block_size=64 is not supported; use 1 or 128 or 256 or 512"),
        ({"col_block_size": 32}, r"col_block_size=32 is not supported; use 64 or 128 or 192 or 256"),
        ({"min_scale": -1.0}, r"min_scale=-1.0 is not supported; use 0.0 or a positive number"),
        ({"min_scale": float("nan")}, r"min_scale=nan is not supported"),
        ({"dst_type": 292, "dst_type_max": 15.0}, r"dst_type_max=15.0 is not supported for e4m3"),
        (
            {"dst_type": 290, "round_mode": "round", "dst_type_max": 16.0},
            r"dst_type_max=16.0 is not supported",
        ),
    ],
)
def test_dynamic_block_quant_names_what_it_refuses(arguments, message):
    arguments = {"x": X} | arguments
    with pytest.raises(ValueError, match=message):
        ops.dynamic_block_quant(arguments.pop("x"), **arguments)


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.double(), ONE, None, 1), r"self has dtype torch.float64"),
        ((X[0, 0], ONE, None, 1), r"self has 0 dimensions; 1 to 8 are supported"),
        ((X, ONE, None, torch.int32), r"dtype=torch.int32 is not supported; use int8"),
        ((X, ONE.half(), None, 1), r"scales has dtype torch.float16; use torch.float32 or torch.bfloat16"),
        ((X, ONE.expand(3), None, 1, 0), r"scales has shape \[3\], expected \[4\] \(1, or .* axis 0\)"),
        ((X, ONE[None], None, 1, 0), r"scales has shape \[1, 1\], expected \[4\]"),
        ((X, ONE.expand(4), None, 1, 2), r"axis=2 is out of range for self with 2 dimensions; use -2 to 1"),
        ((X, ONE, ONE.double(), 1), r"zero_points has dtype torch.float64"),
        ((X, ONE, ONE.expand(4), 1), r"zero_points has shape \[4\], expected \[1\] \(as scales\)"),
        ((X, ONE, None, 1, 0, "no"), r"div_mode='no' is not supported; use True or False"),
        ((X, ONE, None, 1, 0, False), r"scales has dtype torch.float32; with div_mode=False use torch.bf"),
        (
            (X, ONE.bfloat16(), ONE, 1, 0, False),
            r"zero_points has dtype torch.float32; with div_mode=False use torch.bfloat16",
        ),
        ((X, ONE.bfloat16(), None, 1, -3, False), r"axis=-3 is not supported with div_mode=False"),
    ],
)
def test_quantize_names_what_it_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ops.quantize(*arguments)


def test_inputs_are_left_as_they_are():
    x, smooth = with_specials(normal((30, 70))), normal((70,), seed=1)
    before = (x.clone(), smooth.clone())
    ops.dynamic_quant(x, smooth_scales=smooth, dst_type=290)
    ops.dynamic_block_quant(x, dst_type=292)
    ops.quantize(x, smooth, None, 291)
    assert_same_bytes(x, before[0])
    assert_same_bytes(smooth, before[1])


@needs_kernels
@pytest.mark.parametrize("largest", [43.79697941564136, 29102.86791683007, 1e-3, 32768.0])
def test_maxima_that_fp32_does_not_hold(largest):
    arguments = (wide_range((64, 64), torch.bfloat16), None, None, HIF8.npu_code, "pertoken", largest)
    for actual, expected in zip(
        scaled.dynamic_quant(*arguments), reference.dynamic_quant(*arguments), strict=True
    ):
        assert_same_bytes(actual, expected)


@needs_kernels
@pytest.mark.parametrize("min_scale", [1e-44, 1e-39, 0.1, 1 / 3, 1e30])
def test_limits_of_scales_that_fp32_does_not_hold(min_scale):
    arguments = (wide_range((64, 256), torch.bfloat16), min_scale, E4M3.npu_code, 1, 128, 0.0)
    for actual, expected in zip(
        scaled.dynamic_block_quant(*arguments), reference.dynamic_block_quant(*arguments), strict=True
    ):
        assert_same_bytes(actual, expected)


def test_a_maximum_below_the_smallest_code_is_refused():
    with pytest.raises(ValueError, match=r"dst_type_max=1e-45 is below"):
        ops.dynamic_quant(normal((4, 4)), dst_type=290, dst_type_max=1e-45)
