"""What the quantizers return: layouts, blocks, saturation, non-finite input, all memory layouts."""

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.ops.reference import mx as reference
from tests.ops.data import ALGORITHMS, FLOATS, FLOATS_AND_FP32, FORMATS, assert_same_bytes, normal, wide_range

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("shape", "axis", "scale_shape"),
    [
        ((7,), 0, (1, 2)),
        ((3, 100), -1, (3, 2, 2)),
        ((100, 3), -2, (2, 3, 2)),
        ((100, 3), 0, (2, 3, 2)),
        ((2, 65, 3, 4), 1, (2, 2, 3, 4, 2)),
        ((1, 2, 1, 2, 1, 2, 64), 6, (1, 2, 1, 2, 1, 2, 1, 2)),
        ((0, 64), -1, (0, 1, 2)),
        ((64, 0), -1, (64, 0, 2)),
        ((0, 64), -2, (0, 64, 2)),
        ((64, 0), 0, (1, 0, 2)),
    ],
)
def test_shapes_and_layout(shape, axis, scale_shape):
    y, mxscale = ops.dynamic_mx_quant(normal(shape), axis=axis, dst_type=E4M3)
    assert (y.shape, y.dtype, y.is_contiguous()) == (shape, E4M3, True)
    assert (mxscale.shape, mxscale.dtype, mxscale.is_contiguous()) == (scale_shape, torch.uint8, True)


def test_last_axis_scales_stand_in_order_and_padding_is_zero():
    x = torch.cat([torch.full((1, 32), 2.0**i) for i in range(3)], dim=1).bfloat16()
    _, mxscale = ops.dynamic_mx_quant(x, dst_type=E4M3)
    assert mxscale.tolist() == [[[119, 120], [121, 0]]]


def test_second_last_axis_scales_are_interleaved_by_two_blocks_and_padding_is_zero():
    blocks = [torch.tensor([[2.0**i, 2.0 ** (i + 10)]]).expand(32, 2) for i in range(3)]
    _, mxscale = ops.dynamic_mx_quant(torch.cat(blocks).bfloat16(), axis=-2, dst_type=E4M3)
    assert mxscale.tolist() == [[[119, 120], [129, 130]], [[121, 0], [131, 0]]]


def test_ocp_scale_saturates_and_scale_alg_1_does_not():
    x = torch.tensor([[511.0, -511.0, 448.0, 1.0]]).bfloat16()  # 511 rounds to 512 in bf16
    x[0, :2] = torch.tensor([510.0, -510.0])
    y, mxscale = ops.dynamic_mx_quant(x, dst_type=E4M3)
    assert mxscale.flatten().tolist() == [127, 0]
    assert y.float().tolist() == [[448.0, -448.0, 448.0, 1.0]]
    y, mxscale = ops.dynamic_mx_quant(x, dst_type=E4M3, scale_alg=1)
    assert mxscale.flatten().tolist() == [128, 0]
    assert y.float().tolist() == [[256.0, -256.0, 224.0, 0.5]]


def test_e5m2_saturates_instead_of_becoming_inf():
    y, _ = ops.dynamic_mx_quant(torch.tensor([[65280.0, -65280.0]]).bfloat16(), dst_type=E5M2)
    assert y.float().tolist() == [[57344.0, -57344.0]]


def test_scale_follows_the_exact_amax_of_fp32():
    below = torch.tensor([1.0]).nextafter(torch.tensor([0.0]))
    x = torch.cat([below, torch.zeros(31)])[None]
    _, mxscale = ops.dynamic_mx_quant(x, dst_type=E4M3)
    assert mxscale[0, 0, 0] == 127 - 1 - 8


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_zero_blocks_have_scale_zero_and_keep_signs(dtype, axis):
    x = torch.zeros(64, 64, dtype=dtype)
    x[3] = -0.0
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, dst_type=E4M3)
    assert not mxscale.any()
    assert_same_bytes(y, x.to(E4M3))


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_block_with_a_nonfinite_element_is_marked_and_no_other(dtype, bad, info, alg):
    x = normal((64, 64), dtype)
    clean = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=info.dtype, scale_alg=alg)
    x[40, 5] = bad
    y1, mxscale1, y2, mxscale2 = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=info.dtype, scale_alg=alg)
    for result, before, rows, columns in (
        (y1, clean[0], slice(40, 41), slice(0, 32)),
        (y2, clean[2], slice(32, 64), slice(5, 6)),
    ):
        expected = before.view(torch.uint8).clone()
        expected[rows, columns] = 0
        assert_same_bytes(result.view(torch.uint8), expected)
    assert (mxscale1 == 0xFF).nonzero().tolist() == [[40, 0, 0]]
    assert (mxscale2 == 0xFF).nonzero().tolist() == [[0, 5, 1]]
    values = ops.anti_mx_quant(y1, mxscale1, dst_type=torch.float32)
    assert values.isnan().nonzero().tolist() == [[40, column] for column in range(32)]


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64, 64), (33, 95), (3, 40, 1100), (2, 3, 5), (0, 7), (7, 0)], ids=str)
def test_dual_axis_equals_two_single_axis_calls(shape, dtype, info, alg):
    x = wide_range(shape, dtype)
    dual = ops.dynamic_mx_quant_with_dual_axis(x, dst_type=info.dtype, scale_alg=alg)
    single = [
        *ops.dynamic_mx_quant(x, axis=-1, dst_type=info.dtype, scale_alg=alg),
        *ops.dynamic_mx_quant(x, axis=-2, dst_type=info.dtype, scale_alg=alg),
    ]
    for actual, expected in zip(dual, single, strict=True):
        assert_same_bytes(actual, expected)


LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "rows of a wider matrix": lambda x: torch.nn.functional.pad(x, (3, 6))[:, 3:-6],
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "odd storage offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "flipped twice": lambda x: x.flip(0).flip(0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(64, 128), (70, 130)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_the_reference_takes_every_memory_layout(dtype, shape, axis, layout):
    x = wide_range(shape, dtype)
    expected = ops.dynamic_mx_quant(x, axis=axis, dst_type=E4M3)
    actual = reference.dynamic_mx_quant(LAYOUTS[layout](x), axis, 292, "rint", 32, 0, 0.0, 0.0)
    for a, b in zip(actual, expected, strict=True):
        assert_same_bytes(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_results_do_not_depend_on_memory_layout_and_input_is_untouched(dtype, axis, layout):
    x = wide_range((70, 130), dtype)
    expected = ops.dynamic_mx_quant(x, axis=axis, dst_type=E4M3)
    view = LAYOUTS[layout](x)
    before = view.clone()
    for actual, wanted in zip(ops.dynamic_mx_quant(view, axis=axis, dst_type=E4M3), expected, strict=True):
        assert_same_bytes(actual, wanted)
    assert_same_bytes(view, before)


def test_expanded_input():
    row = normal((1, 64))
    y, mxscale = ops.dynamic_mx_quant(row.expand(40, 64), axis=-2, dst_type=E4M3)
    wanted, wanted_scale = ops.dynamic_mx_quant(row.repeat(40, 1), axis=-2, dst_type=E4M3)
    assert_same_bytes(y, wanted)
    assert_same_bytes(mxscale, wanted_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_anti_mx_quant_returns_the_values_in_each_dtype(dtype):
    x = normal((40, 70))
    y, mxscale = ops.dynamic_mx_quant(x, dst_type=E4M3)
    scale = torch.exp2(mxscale.flatten(1).double() - 127).repeat_interleave(32, dim=1)[:, :70]
    assert_same_bytes(ops.anti_mx_quant(y, mxscale, dst_type=dtype), (y.double() * scale).to(dtype))


def test_anti_mx_quant_of_tiny_scales_is_exact_in_fp32_and_rounded_in_bf16():
    codes = torch.arange(0x7F, dtype=torch.uint8)[None].view(E4M3)
    mxscale = torch.zeros(1, 2, 2, dtype=torch.uint8)
    exact = codes.double() * 2.0**-127
    assert_same_bytes(ops.anti_mx_quant(codes, mxscale, dst_type=torch.float32), exact.float())
    assert_same_bytes(ops.anti_mx_quant(codes, mxscale), exact.float().bfloat16())
