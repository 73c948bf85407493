"""torchtitan-npu's own quantized linear and grouped matmul functions under the emulator, unchanged.

Runs where TORCHTITAN_NPU_PATH points at a checkout of hicann/torchtitan-npu. The modules of torchtitan that
its files import for other purposes are stood in for.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

PATH = os.environ.get("TORCHTITAN_NPU_PATH")
pytestmark = pytest.mark.skipif(not PATH, reason="TORCHTITAN_NPU_PATH is not set: a torchtitan-npu checkout")

COUNTS = [40, 0, 24, 33]

# How far results may be from those of bf16, as a fraction of the norm; 0.037 to 0.044 and 0.143 to 0.151 were
# measured. They scale HiFloat8 so that the largest magnitude becomes its largest value, where one bit of
# mantissa is left.
MXFP8, HIF8 = 0.05, 0.2


def load() -> SimpleNamespace:
    """Their modules; packages are entered without running their __init__, which imports all of torchtitan."""
    package = "torchtitan_npu"
    folders = ("", ".converters", ".converters.kernels", ".patches", ".patches.quantization")
    for name in folders:
        module = ModuleType(package + name)
        module.__path__ = [os.path.join(PATH, package, *name.split(".")[1:])]
        sys.modules[module.__name__] = module
    for name in (
        "torchtitan.models.common.moe",
        f"{package}.converters.convert_utils",
        f"{package}.converters.model_custom_interface",
        f"{package}.converters.registry",
        f"{package}.tools.weight_utils",
        f"{package}.patches.quantization.quant_config",
    ):
        sys.modules[name] = MagicMock()
    kernels = f"{package}.converters.kernels"
    return SimpleNamespace(
        linear=importlib.import_module(f"{kernels}.quant_linear"),
        gmm=importlib.import_module(f"{kernels}.quant_gmm"),
        sizes=importlib.import_module(f"{kernels}.gmm").group_size_params,
    )


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(function, *inputs: Tensor) -> list[Tensor]:
    """The result of function, and the gradients of its inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    result.backward(random(*result.shape, seed=9))
    return [result.detach(), *(x.grad for x in leaves)]


def assert_close(results: list[Tensor], exact: list[Tensor], error: float) -> None:
    for result, expected in zip(results, exact, strict=True):
        assert result.shape == expected.shape and result.dtype == expected.dtype
        distance = (result.float() - expected.float()).norm() / expected.float().norm()
        assert distance < error, f"{distance:.3f}"


def check_linear() -> None:
    ours = load().linear
    x, w = random(3, 50, 96, seed=0), random(72, 96, seed=1)
    exact = gradients(torch.nn.functional.linear, x, w)
    assert_close(gradients(ours.MXfp8MM.apply, x, w), exact, MXFP8)
    x = random(150, 96, seed=0)
    exact = gradients(torch.nn.functional.linear, x, w)
    assert_close(gradients(ours.Hif8MM.apply, x, w), exact, HIF8)


def test_quantized_linear(emulated):
    emulated(check_linear)


def check_mxfp8_experts() -> None:
    theirs = load()
    ends = torch.tensor(COUNTS).cumsum(0)
    x, w = random(sum(COUNTS), 96, seed=0), random(4, 96, 64, seed=1)

    def exact(x, w):
        return torch.cat([part @ w[e] for e, part in enumerate(x.split(COUNTS))])

    results = gradients(lambda x, w: theirs.gmm.npu_grouped_mxfp8_mm(x, w, ends), x, w)
    assert_close(results, gradients(exact, x, w), MXFP8)


def test_quantized_experts(emulated):
    emulated(check_mxfp8_experts)


def check_hif8_experts() -> None:
    theirs = load()
    ends = torch.tensor([24, 48, 72, 96])  # it divides rows evenly
    theirs.sizes["g_size"] = 4
    x, w = random(96, 96, seed=0), random(4, 96, 64, seed=1)

    def exact(x, w):
        return torch.cat([part @ w[e] for e, part in enumerate(x.split(24))])

    results = gradients(lambda x, w: theirs.gmm.npu_grouped_hif8_mm(x, w, ends), x, w)
    assert_close(results, gradients(exact, x, w), HIF8)


def test_quantized_experts_in_hifloat8(emulated):
    emulated(check_hif8_experts)
