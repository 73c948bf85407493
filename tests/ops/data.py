"""Inputs that the operator tests share."""

import pytest
import torch
from torch import Tensor

from mindspeed_lowp.formats import E4M3, E5M2
from mindspeed_lowp.ops import kernels

FORMATS = [pytest.param(info, id=info.name) for info in (E4M3, E5M2)]
ALGORITHMS = [pytest.param(alg, id=f"alg{alg}") for alg in (0, 1)]
FLOATS = [
    pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float16)
]
FLOATS_AND_FP32 = [*FLOATS, pytest.param(torch.float32, id="float32")]


def cpu_level(level: str):
    """A parameter for the CPU level of that name, skipped with a reason where it cannot run."""
    missing = level not in kernels.supported_levels()
    return pytest.param(
        level,
        marks=pytest.mark.skipif(
            missing, reason=f"this CPU cannot run the {level} kernels, or they are not built"
        ),
    )


def wide_range(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers over the whole exponent range of ``dtype``, with zeros and signed zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-24, 15) if dtype == torch.float16 else (-149, 126)
    exponents = torch.randint(low, high, shape, generator=generator).double()
    x = torch.randn(shape, generator=generator, dtype=torch.double) * torch.exp2(exponents)
    x[torch.rand(shape, generator=generator) < 0.05] = 0.0
    x[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_bytes(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bits."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    differ = (actual.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).nonzero()
    assert len(differ) == 0, f"{len(differ)} bytes differ, the first at {differ[0].tolist()}"
