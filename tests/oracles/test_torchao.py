"""torchao's `to_mx` (FLOOR, the OCP scale), an independent implementation of MX blocks.

Compared where its conventions are ours: blocks of finite elements with a scale byte above 0. Below, torchao
divides by 2**-126 instead of 2**-127; a block with NaN keeps its other elements there and is all zeros here.
"""

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from mindspeed_lowp import ops
from tests.ops.data import FORMATS, assert_same_bytes, wide_range

FLOATS = [pytest.param(torch.bfloat16, id="bfloat16"), pytest.param(torch.float32, id="float32")]


def assert_agrees(blocks, info):
    scale, codes = to_mx(blocks, info.dtype, 32, scaling_mode=ScaleCalculationMode.FLOOR)
    y, mxscale = ops.dynamic_mx_quant(blocks, dst_type=info.dtype)
    byte = mxscale[:, 0, 0]
    comparable = (byte > 0) & (byte < 0xFF)
    assert comparable.sum() > len(blocks) // 2
    assert_same_bytes(byte[comparable], scale.view(torch.uint8).flatten()[comparable])
    assert_same_bytes(y[comparable], codes[comparable])


@pytest.mark.parametrize("info", FORMATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_blocks(dtype, info):
    assert_agrees(wide_range((4000, 32), dtype), info)


@pytest.mark.parametrize("info", FORMATS)
def test_every_bf16_pattern_as_amax(info):
    amax = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    blocks = (amax.float()[:, None] * torch.linspace(-1, 1, 32)).bfloat16()
    assert_agrees(blocks, info)
