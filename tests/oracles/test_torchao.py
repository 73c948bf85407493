"""torchao's `to_mx`, an independent implementation of MX blocks: FLOOR is `scale_alg` 0, RCEIL 1 (E2M1: 2).

Compared where its conventions are ours: blocks of finite elements with a scale byte above 0. Below, torchao
divides by 2**-126 instead of 2**-127; a block with NaN keeps its other elements there and is all zeros here.

RCEIL rounds ``log2(amax / max)``, taken in fp32, up to an integer. Just above a power of two that logarithm
is the integer itself, and the scale half of ours, which looks at the bits of ``amax / max``.
"""

import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from mindspeed_lowp import ops
from mindspeed_lowp.formats import E2M1, E4M3, E5M2, FormatInfo
from tests.ops.data import assert_same_bytes, wide_range

FLOATS = [pytest.param(torch.bfloat16, id="bfloat16"), pytest.param(torch.float32, id="float32")]
FORMATS = [pytest.param(info, id=info.name) for info in (E4M3, E5M2, E2M1)]
TORCH_TYPE = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E2M1: torch.float4_e2m1fn_x2}
ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def assert_agrees(
    blocks: Tensor, info: FormatInfo, mode: ScaleCalculationMode, scale_alg: int, apart: Tensor | bool = False
) -> None:
    """Same bytes in all comparable blocks but those that are known to be ``apart``."""
    scale, codes = to_mx(blocks, TORCH_TYPE[info], 32, scaling_mode=mode)
    y, mxscale = ops.dynamic_mx_quant(blocks, dst_type=info.npu_code, scale_alg=scale_alg)
    byte, theirs = mxscale[:, 0, 0], scale.view(torch.uint8).flatten()
    comparable = (byte > 0) & (byte < 0xFF) & ~torch.as_tensor(apart)
    assert comparable.sum() > len(blocks) // 2
    assert_same_bytes(byte[comparable], theirs[comparable])
    assert_same_bytes(y[comparable], codes[comparable])


def parts(blocks: Tensor, info: FormatInfo) -> Tensor:
    """Where fp32's logarithm of ``amax / max`` is an integer though that is no power of two."""
    quotient = blocks.float().abs().amax(1) / info.max
    logarithm = quotient.log2()
    return (logarithm == logarithm.round()) & logarithm.isfinite() & (torch.frexp(quotient)[0] != 0.5)


@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_blocks(dtype, info):
    blocks = wide_range((4000, 32), dtype)
    assert_agrees(blocks, info, ScaleCalculationMode.FLOOR, 0)


@pytest.mark.parametrize("info", FORMATS)
def test_every_bf16_pattern_as_amax(info):
    blocks = (ALL_BF16.float()[:, None] * torch.linspace(-1, 1, 32)).bfloat16()
    assert_agrees(blocks, info, ScaleCalculationMode.FLOOR, 0)


@pytest.mark.parametrize("info", FORMATS)
def test_scales_rounded_up(info):
    """`scale_alg` 2 looks at amax in bf16, so E2M1 is compared for bf16 only."""
    scale_alg, dtype = (2, torch.bfloat16) if info == E2M1 else (1, torch.float32)
    blocks = (ALL_BF16.float()[:, None] * torch.linspace(-1, 1, 32)).bfloat16()
    assert not (parts(blocks, info) & blocks.isfinite().all(1)).any()
    for x in (blocks, wide_range((4000, 32), dtype)):
        assert_agrees(x, info, ScaleCalculationMode.RCEIL, scale_alg, apart=parts(x, info))


@pytest.mark.parametrize("info", [E4M3, E5M2], ids=lambda info: info.name)
def test_where_scales_rounded_up_part(info):
    """fp32 magnitudes in steps of 2 ulp about ``max`` times a power of two."""
    powers = info.max * torch.exp2(torch.arange(-16.0, 16.0))
    neighbours = (
        (powers.view(torch.int32)[:, None] + torch.arange(-60, 60, 2, dtype=torch.int32))
        .view(torch.float32)
        .reshape(-1, 1)
    )
    x = neighbours.repeat(1, 32)
    apart = parts(x, info)
    assert apart.sum() > 50
    assert_agrees(x, info, ScaleCalculationMode.RCEIL, 1, apart)
    theirs, _ = to_mx(x[apart], TORCH_TYPE[info], 32, scaling_mode=ScaleCalculationMode.RCEIL)
    _, ours = ops.dynamic_mx_quant(x[apart], dst_type=info.npu_code, scale_alg=1)
    logarithm = (x[apart, 0] / info.max).log2()
    above = torch.exp2(logarithm) < x[apart, 0] / info.max
    assert above.any()
    difference = ours[:, 0, 0].int() - theirs.view(torch.uint8).flatten().int()
    assert difference.tolist() == above.int().tolist()
