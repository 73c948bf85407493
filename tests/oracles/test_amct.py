"""MXFP4 fake quantization against the FakeQuant toolkit, in a checkout of hicann/amct named by AMCT_PATH."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.qat import mxfp4_quant_dequant
from tests.ops.data import FLOATS_AND_FP32, wide_range
from tests.ops.test_mxfp4 import assert_same, every_pattern

FOLDER = "amct_pytorch/experimental/fakequant/mxfp4_ascendc"

pytestmark = pytest.mark.skipif(
    "AMCT_PATH" not in os.environ, reason="AMCT_PATH does not name a checkout of hicann/amct"
)


@pytest.fixture(scope="module")
def toolkit():
    return load("reference/mxfp4_ref.py").quant_dequant_mxfp4


def load(path: str) -> ModuleType:
    """A module of the toolkit."""
    file = Path(os.environ["AMCT_PATH"]) / FOLDER / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    for backend in ("auto", "torch"):
        assert_same(mxfp4_quant_dequant(x, block_size, 5.3, backend), expected)


def test_random_fp32_patterns(toolkit):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (10_000_000 // 8, 8), generator=generator).int().view(torch.float32)
    assert_same(ops.quant_dequant_mxfp4(x), toolkit(x))


@pytest.mark.parametrize("name", ["test_mxfp4.py", "test_inv_scale.py"])
def test_the_toolkits_own_tests_pass_on_our_operator(name, monkeypatch, capsys):
    """They compare its compiled operator on an NPU with its reference: ours, on the CPU, in its place."""

    def operator(x, block_size=32, inv_scale_factor_scale=1.0):
        return mxfp4_quant_dequant(x, block_size, 6.0 / inv_scale_factor_scale)

    compiled = ModuleType("mxfp4")
    compiled.quant_dequant_mxfp4 = operator
    monkeypatch.setitem(sys.modules, "mxfp4", compiled)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(torch.Tensor, "npu", lambda self: self, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = load(f"tests/{name}")
    tests = [value for key, value in vars(module).items() if key.startswith("test_")]
    assert tests and all(test() for test in tests), capsys.readouterr().out
    sys.modules.pop("mxfp4_ref")
