"""Every bf16 bit pattern, as element and as amax, against ml_dtypes and a float64 transcription."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from mindspeed_lowp import ops
from tests.ops.data import ALGORITHMS, FLOATS_AND_FP32, FORMATS, assert_same_bytes, wide_range

ORACLE = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def transcription(x: Tensor, info, alg: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks ``[n, up to 32]`` by the documents' formulas, in float64, where none of the products rounds."""
    x = x.double().numpy()
    amax = np.abs(x).max(axis=1)  # NaN if any element is
    broken = ~np.isfinite(amax)
    safe = np.where(broken | (amax == 0), 1.0, amax)
    if alg == 0:
        exponent = np.frexp(safe)[1] - 1 - info.emax
    else:
        s = safe.astype(np.float32) / np.float32(info.max)
        mantissa, exponent = np.frexp(s.astype(np.float64))  # 0.5 <= mantissa < 1
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)  # rounded up unless a power of two
    exponent = np.where(amax == 0, -127, np.maximum(exponent, -127))
    scaled = np.clip(x * np.exp2(-exponent.astype(np.float64))[:, None], -info.max, info.max)
    with np.errstate(invalid="ignore"):
        codes = scaled.astype(np.float32).astype(ORACLE[info.name]).view(np.uint8)
    codes[broken] = 0
    return codes, np.where(broken, 0xFF, exponent + 127).astype(np.uint8)


def assert_quantizes_like_the_transcription(blocks: Tensor, info, alg: int) -> None:
    codes, byte = transcription(blocks, info, alg)
    for x, axis in ((blocks, -1), (blocks.t(), -2)):
        y, mxscale = ops.dynamic_mx_quant(x, axis=axis, dst_type=info.dtype, scale_alg=alg)
        y, mxscale = (y, mxscale[:, 0]) if axis == -1 else (y.t(), mxscale[0])
        assert_same_bytes(y.view(torch.uint8), torch.from_numpy(codes))
        assert_same_bytes(mxscale[:, 0], torch.from_numpy(byte))
        assert not mxscale[:, 1].any()


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
def test_every_bf16_pattern_as_amax(info, alg):
    fractions = torch.tensor([1.0, -0.97, 0.5, -0.26, 0.1, 0.01, -1e-4, 0.0])
    blocks = (ALL_BF16.float()[:, None] * fractions).bfloat16()
    blocks[:, 0] = ALL_BF16
    assert_quantizes_like_the_transcription(blocks, info, alg)


@pytest.mark.parametrize("info", FORMATS)
def test_every_bf16_pattern_as_element_under_a_fixed_scale(info):
    """The first element fixes the scale at 1, so that the codes are plain casts of the others."""
    finite = ALL_BF16[ALL_BF16.abs() <= 2.0**info.emax]
    finite = torch.nn.functional.pad(finite, (0, -len(finite) % 31)).view(-1, 31)
    blocks = torch.cat([torch.full((len(finite), 1), 2.0**info.emax, dtype=torch.bfloat16), finite], dim=1)
    y, mxscale = ops.dynamic_mx_quant(blocks, dst_type=info.dtype)
    assert (mxscale[:, 0, 0] == 127).all()
    oracle = blocks.float().numpy().astype(ORACLE[info.name]).view(np.uint8)
    assert_same_bytes(y.view(torch.uint8), torch.from_numpy(oracle))


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_random_blocks_over_the_whole_range(dtype, info, alg):
    assert_quantizes_like_the_transcription(wide_range((5000, 32), dtype, seed=alg), info, alg)


@pytest.mark.parametrize("info", FORMATS)
def test_ties_round_to_even_and_neighbours_do_not(info):
    """fp32 values at, just below and just above the middle of every two neighbouring codes."""
    codes = torch.arange(0x7E if info.name == "e4m3" else 0x7B, dtype=torch.uint8).view(info.dtype).float()
    top = torch.tensor([2.0**info.emax])
    middle = (codes[:-1] + codes[1:]) / 2
    values = torch.cat([middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))])
    values = values[values <= top]
    blocks = torch.stack([torch.cat([top, v[None], -v[None], torch.zeros(29)]) for v in values])
    y, _ = ops.dynamic_mx_quant(blocks, dst_type=info.dtype)
    oracle = blocks.numpy().astype(ORACLE[info.name]).view(np.uint8)
    assert_same_bytes(y.view(torch.uint8), torch.from_numpy(oracle))
