"""The functions of a tensor: the toolkit's numbers from every backend, and the gradients."""

import pytest
import torch

from mindspeed_lowp.ops import kernels
from mindspeed_lowp.qat import (
    MXFP4FakeQuantizer,
    MXFP8Grid,
    mxfp4_fake_quant,
    mxfp4_quant_dequant,
    mxfp4_saturation_mask,
    straight_through,
)
from tests.ops.data import FLOATS_AND_FP32, assert_same_bytes, wide_range
from tests.ops.test_mxfp4 import assert_same, every_pattern
from tests.qat.toolkit import MIDPOINTS, toolkit, toolkit_saturates

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
BACKENDS = ["auto", "torch", pytest.param("native", marks=needs_kernels)]
SHAPES = [(2, 33), (3, 17), (4, 48, 33), (1,), (5, 0), (0, 5)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_bf16_value_in_a_block_with_others_and_alone(backend):
    every = every_pattern(torch.bfloat16)
    finite = every[every.isfinite()]
    for x in (finite.view(-1, 64), finite[:, None]):
        assert_same_bytes(mxfp4_quant_dequant(x, backend=backend), toolkit(x))
        assert torch.equal(mxfp4_saturation_mask(x), toolkit_saturates(x))
    with_inf = every.view(-1, 1)  # which the toolkit leaves undefined: NaN here
    assert torch.equal(mxfp4_quant_dequant(with_inf, backend=backend).isnan(), ~with_inf.isfinite())


@pytest.mark.parametrize("backend", BACKENDS)
def test_midpoints_and_their_neighbours(backend):
    midpoints = torch.tensor(MIDPOINTS)
    up, down = (midpoints.nextafter(torch.tensor(end)) for end in (9.0, 0.0))
    x = torch.cat([down, midpoints, up, torch.tensor([6.0])])
    for exponent in (-32, -20, 0, 30):  # below 2 ** -30 the scale is held, and the codes shrink
        scaled = torch.stack([x, -x]) * 2.0**exponent
        assert_same_bytes(mxfp4_quant_dequant(scaled, backend=backend), toolkit(scaled))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scale_is_held_at_two_to_the_minus_30(backend):
    smallest = 2.0**-30
    x = torch.tensor([[6.0, 0.75], [2.0, 0.3], [0.2, 0.1]]) * smallest
    expected = torch.tensor([[6.0, 1.0], [2.0, 0.5], [0.0, 0.0]]) * smallest
    assert torch.equal(mxfp4_quant_dequant(x, backend=backend), expected)
    assert torch.equal(toolkit(x), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_shapes_block_sizes_and_factors(backend, dtype):
    for shape in SHAPES:
        x = wide_range(shape, dtype)
        for block_size, scale_factor in ((32, 6.0), (16, 6.0), (64, 5.0), (128, 7.5), (7, 6.0)):
            how = (block_size, scale_factor)
            assert_same(mxfp4_quant_dequant(x, *how, backend), toolkit(x, *how))
            if dtype == torch.float32:
                assert torch.equal(mxfp4_saturation_mask(x, *how), toolkit_saturates(x, *how))


@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_the_mask_compares_in_fp32(dtype):
    """6 * scale may not be a number of x's dtype: fp16 has few small ones."""
    x = (torch.randn(64, 33) * 2.0 ** torch.randint(-26, 10, (64, 1))).to(dtype)
    assert torch.equal(mxfp4_saturation_mask(x), toolkit_saturates(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_layout_and_axis(backend):
    x = wide_range((3, 40, 70), torch.float32)
    for view in (x.transpose(0, 1), x[:, ::2], x[..., 5:44], x.permute(2, 1, 0)):
        assert_same_bytes(mxfp4_quant_dequant(view, backend=backend), toolkit(view.contiguous()))
    for axis in (-2, 1, 0):
        expected = toolkit(x.transpose(axis, -1).contiguous()).transpose(axis, -1)
        assert_same_bytes(mxfp4_quant_dequant(x, backend=backend, axis=axis), expected.contiguous())
        mask = toolkit_saturates(x.transpose(axis, -1).contiguous()).transpose(axis, -1)
        assert torch.equal(mxfp4_saturation_mask(x, axis=axis), mask)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_gradients_pass_straight_through_or_stop_exactly_where_x_saturates(dtype, axis):
    x = (torch.randn(40, 70) * 3).to(dtype).requires_grad_()
    grad = torch.randn(40, 70).to(dtype)
    y = mxfp4_fake_quant(x, axis=axis)
    assert_same_bytes(y.detach(), mxfp4_quant_dequant(x, axis=axis))
    assert not mxfp4_quant_dequant(x).requires_grad
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], grad)

    clipped = torch.autograd.grad(mxfp4_fake_quant(x, clip_grad=True, axis=axis), x, grad)[0]
    saturates = toolkit_saturates(x.detach().transpose(axis, -1)).transpose(axis, -1)
    assert 20 < int(saturates.sum()) < 400
    assert torch.equal(clipped == 0, saturates)
    assert torch.equal(clipped[~saturates], grad[~saturates])


def test_nothing_saturates_with_the_ceiling_and_more_with_a_smaller_factor():
    x = torch.randn(64, 256)
    assert not mxfp4_saturation_mask(x, scale_mode="ceil").any()
    counts = [int(mxfp4_saturation_mask(x, scale_factor=f).sum()) for f in (4.0, 6.0, 9.0)]
    assert counts == sorted(counts) and counts[0] == 0 < counts[1] < counts[2]


def test_the_module_is_the_function_and_has_no_state():
    x = torch.randn(5, 70, requires_grad=True)
    quantizer = MXFP4FakeQuantizer(16, 5.0, True, "torch", scale_mode="floor")
    assert not quantizer.state_dict() and not list(quantizer.parameters())
    expected = mxfp4_fake_quant(x, 16, 5.0, True, "torch", scale_mode="floor")
    assert torch.equal(quantizer(x), expected)
    ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (quantizer(x), expected))
    assert torch.equal(ours, theirs) and not ours.all()


def test_a_learned_scale_factor_follows_the_gradient_of_its_logarithm():
    """Against autograd through scales whose rounding is a constant offset, in fp64."""
    x = torch.randn(20, 64, requires_grad=True)
    grad = torch.randn(20, 64)
    quantizer = MXFP4FakeQuantizer(scale_factor=9.0, learnable_scale_factor=True)
    assert list(quantizer.state_dict()) == ["log2_scale_factor"]
    y = quantizer(x)
    assert torch.equal(y, mxfp4_quant_dequant(x, scale_factor=2.0 ** quantizer.log2_scale_factor.item()))
    y.backward(grad)
    assert torch.equal(x.grad, grad)

    p = quantizer.log2_scale_factor.detach().double().requires_grad_()
    amax = x.detach().double().unflatten(-1, (2, 32)).abs().amax(-1, keepdim=True)
    exact = torch.log2(amax) - p
    scale = torch.exp2(exact + (exact.round() - exact).detach())
    scaled = x.detach().double().unflatten(-1, (2, 32)) / scale
    code = scaled.clamp(-6, 6)
    code = code + (y.detach().double().unflatten(-1, (2, 32)) / scale - code).detach()
    (code * scale).flatten(-2).backward(grad.double())
    torch.testing.assert_close(quantizer.log2_scale_factor.grad.double(), p.grad, rtol=1e-5, atol=0)


def test_learning_the_scale_factor_lowers_the_error():
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    quantizer = MXFP4FakeQuantizer(scale_factor=12.0, learnable_scale_factor=True)
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.02)
    errors = []
    for _ in range(60):
        error = (quantizer(x) - x).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.7 * errors[0]


@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
@pytest.mark.parametrize("scale_mode", ["floor", "ceil"])
def test_mxfp8_grid(scale_mode, dtype):
    """Against torch's own float8 and the rule of the scale, block by block."""
    x = (torch.randn(5, 70) * 2.0 ** torch.randint(-6, 7, (5, 70))).to(dtype)
    grid = MXFP8Grid(scale_mode)
    expected, beyond = torch.empty(x.shape), torch.empty(x.shape, dtype=torch.bool)
    for first in range(0, 70, 32):
        block = x[:, first : first + 32].float()
        amax = block.abs().amax(-1, keepdim=True)
        if scale_mode == "floor":
            scale = torch.exp2(torch.floor(torch.log2(amax.double())) - 8).float()
        else:
            scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
        codes = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        expected[:, first : first + 32] = codes.float() * scale
        beyond[:, first : first + 32] = block.abs() > 448 * scale
    assert_same_bytes(grid.project(x), expected.to(dtype))
    assert torch.equal(grid.saturated(x), beyond)
    assert_same_bytes(grid.project(x.t(), -2), expected.to(dtype).t().contiguous())
    assert bool(beyond.any()) == (scale_mode == "floor")


def test_mxfp8_small_and_empty_tensors():
    x = torch.randn(3, 5)
    for axis in (-1, -2):
        assert (MXFP8Grid().project(x, axis) - x).abs().max() < 0.1
    assert MXFP8Grid().project(x[:0]).shape == (0, 5)
    tiny = torch.tensor([[1.9, 1.7, -1.9]]) * 2.0**-119  # a scale of 2 ** -127
    assert MXFP8Grid().saturated(tiny).tolist() == [[True, False, True]]


def test_fake_quantization_of_an_already_quantized_tensor_changes_nothing():
    x = mxfp4_quant_dequant(torch.randn(64, 96) * 3, scale_mode="ceil")
    assert torch.equal(straight_through(x, MXFP8Grid()), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size=0: expected a whole number"),
        ({"block_size": 32.0}, "block_size=32.0"),
        ({"block_size": True}, "block_size=True"),
        ({"scale_factor": 0.0}, "scale_factor=0.0"),
        ({"scale_factor": -6.0}, "scale_factor=-6.0"),
        ({"scale_factor": float("nan")}, "scale_factor=nan"),
        ({"scale_mode": "nearest"}, "scale_mode='nearest': expected one of round, floor, ceil"),
        ({"backend": "cuda"}, "backend='cuda': expected one of auto, torch, native, npu"),
        ({"x": torch.ones(4, dtype=torch.float64)}, "x has dtype torch.float64"),
        ({"x": torch.tensor(1.0)}, "x has 0 dimensions"),
    ],
)
def test_unsupported_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        mxfp4_quant_dequant(**{"x": torch.ones(4), **arguments})
