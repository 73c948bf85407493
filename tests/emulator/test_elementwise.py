"""Norm, SwiGLU, masked softmax, rotary embedding: against PyTorch's own, or a formulation of another kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed_lowp.emulator.activations import npu_scaled_masked_softmax, npu_swiglu
from mindspeed_lowp.emulator.norms import npu_rms_norm
from mindspeed_lowp.emulator.rotary import npu_rotary_mul
from tests.emulator.gradients import assert_same_with_gradients

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@pytest.mark.parametrize("dims", [1, 2])
def test_rms_norm(dtype, dims):
    x, gamma = random(3, 4, 6, dtype=dtype), random(*(3, 4, 6)[-dims:], dtype=dtype, seed=1)
    assert_same_with_gradients(
        lambda x, g: npu_rms_norm(x, g, epsilon=1e-3)[0],
        lambda x, g: F.rms_norm(x, g.shape, g, eps=1e-3),
        [x, gamma],
    )
    rstd = npu_rms_norm(x, gamma, 1e-3)[1]
    assert rstd.dtype == torch.float32 and rstd.shape == (3, 4, 6)[:-dims] + (1,) * dims
    expected = 1 / (x.double().square().flatten(-dims).mean(-1) + 1e-3).sqrt()
    torch.testing.assert_close(rstd.flatten(-dims).squeeze(-1).double(), expected, rtol=1e-6, atol=0)


def test_rms_norm_of_another_shape():
    with pytest.raises(ValueError, match=r"gamma \[5\] is no tail of self \[3, 6\]"):
        npu_rms_norm(random(3, 6), random(5))


@DTYPES
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu(dtype, dim):
    def exact(x):
        half = x.shape[dim] // 2
        gate, up = x.narrow(dim, 0, half), x.narrow(dim, half, half)
        return gate / (1 + torch.exp(-gate)) * up

    assert_same_with_gradients(lambda x: npu_swiglu(x, dim=dim), exact, [random(4, 6, 8, dtype=dtype)])


def test_swiglu_of_an_odd_dimension():
    with pytest.raises(ValueError, match=r"dimension -1 of \[2, 3\]"):
        npu_swiglu(random(2, 3))


@DTYPES
def test_scaled_masked_softmax(dtype):
    x = random(2, 3, 5, 7, dtype=dtype)
    mask = random(2, 1, 5, 7, seed=1) > 0.5
    mask[..., 0] = False

    def exact(x):
        return F.softmax((x * 0.7).masked_fill(mask, float("-inf")), -1)

    assert_same_with_gradients(lambda x: npu_scaled_masked_softmax(x, mask, 0.7), exact, [x])


def test_scaled_masked_softmax_with_the_triangle_of_its_own():
    x = random(1, 2, 6, 6)
    result = npu_scaled_masked_softmax(x, torch.ones(1, 1, 6, 6).bool(), 2.0, True)
    for row in range(6):
        torch.testing.assert_close(result[..., row, : row + 1], F.softmax(2 * x[..., row, : row + 1], -1))
        assert result[..., row, row + 1 :].eq(0).all()
    everything = npu_scaled_masked_softmax(x, torch.ones(1, 1, 6, 6).bool())
    torch.testing.assert_close(everything, torch.full_like(x, 1 / 6))  # -10000, not minus infinity


@DTYPES
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_is_a_rotation_of_complex_numbers(dtype, mode):
    x = random(2, 5, 3, 8, dtype=dtype)  # BSND
    angle = random(1, 5, 1, 4, seed=1).double()
    both = torch.cat((angle, angle), -1) if mode == "half" else angle.repeat_interleave(2, -1)
    cos, sin = (torch.complex(both.cos(), both.sin()).real, both.sin())
    cos, sin = cos.to(dtype), sin.to(dtype)

    def exact(x, cos, sin):
        pairs = x.unflatten(-1, (2, 4)).mT if mode == "half" else x.unflatten(-1, (4, 2))
        first = slice(0, 4) if mode == "half" else slice(0, 8, 2)
        turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos[..., first], sin[..., first])
        parts = torch.stack((turned.real, turned.imag), -1)
        return parts.mT.flatten(-2) if mode == "half" else parts.flatten(-2)

    assert_same_with_gradients(
        lambda x: npu_rotary_mul(x, cos, sin, mode), lambda x: exact(x, cos.double(), sin.double()), [x]
    )


def test_rotary_gradients_of_the_angles():
    x, cos, sin = random(2, 3, 1, 4), random(1, 3, 1, 4, seed=1), random(1, 3, 1, 4, seed=2)

    def exact(x, cos, sin):
        a, b = x[..., :2], x[..., 2:]
        return torch.cat((cos[..., :2] * a - sin[..., :2] * b, cos[..., 2:] * b + sin[..., 2:] * a), -1)

    assert_same_with_gradients(npu_rotary_mul, exact, [x, cos, sin])


def test_rotary_by_a_matrix():
    x, cos, sin = random(2, 3, 1, 4), random(1, 3, 1, 4, seed=1), random(1, 3, 1, 4, seed=2)
    half = torch.zeros(4, 4)  # the documentation's matrix for "half"
    half[:2, 2:], half[2:, :2] = torch.eye(2), -torch.eye(2)
    assert torch.equal(npu_rotary_mul(x, cos, sin, "half", half), npu_rotary_mul(x, cos, sin))
    with pytest.raises(ValueError, match="rotary_mode='quarter'"):
        npu_rotary_mul(x, cos, sin, "quarter")
