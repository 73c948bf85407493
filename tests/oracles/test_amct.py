"""MXFP4 fake quantization against the FakeQuant toolkit, in a checkout of hicann/amct named by AMCT_PATH."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.ops.reference import mxfp4 as reference
from tests.ops.data import FLOATS_AND_FP32, wide_range
from tests.ops.test_mxfp4 import assert_same, every_pattern

FOLDER = "amct_pytorch/experimental/fakequant/mxfp4_ascendc/reference"

pytestmark = pytest.mark.skipif(
    "AMCT_PATH" not in os.environ, reason="AMCT_PATH does not name a checkout of hicann/amct"
)


@pytest.fixture(scope="module")
def toolkit():
    path = Path(os.environ["AMCT_PATH"]) / FOLDER / "mxfp4_ref.py"
    spec = importlib.util.spec_from_file_location("mxfp4_ref", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.quant_dequant_mxfp4


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5, 1.5, 0.25, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern(toolkit, dtype, factor):
    amax = every_pattern(dtype)
    blocks = (amax.float()[:, None] * torch.linspace(-1, 1, 32)).to(dtype)
    blocks[:, 3] = amax
    assert_same(ops.quant_dequant_mxfp4(blocks, factor), toolkit(blocks, 6.0 / factor))
    assert_same(ops.quant_dequant_mxfp4(amax, factor), toolkit(amax, 6.0 / factor))


@pytest.mark.parametrize("dtype", FLOATS_AND_FP32)
def test_shapes(toolkit, dtype):
    for shape in [(4, 128), (1, 32), (16, 1024), (64, 4096), (2, 33), (3, 17), (4, 48, 33), (7,)]:
        x = wide_range(shape, dtype)
        assert_same(ops.quant_dequant_mxfp4(x), toolkit(x))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(toolkit, block_size):
    x = wide_range((40, 300), torch.float32)
    expected = toolkit(x, 5.3, block_size)
    assert_same(reference.quant_dequant_mxfp4(x, 5.3, block_size), expected)
    assert_same(torch.ops.lowp.quant_dequant_mxfp4(x, 5.3, block_size), expected)


def test_random_fp32_patterns(toolkit):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (10_000_000 // 8, 8), generator=generator).int().view(torch.float32)
    assert_same(ops.quant_dequant_mxfp4(x), toolkit(x))
