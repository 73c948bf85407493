"""Comparing an operator in bf16 or fp32 with an independent formulation in fp64, gradients included."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# fp32 arithmetic, relative to the largest result: a few dozen roundings on the way, and cancellation.
_ARITHMETIC = 64 * 2**-24


def assert_same_with_gradients(
    operator: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> None:
    """Both, and the gradients of all inputs, agree but for fp32 arithmetic and one rounding to their dtype.

    operator gets the inputs, exact gets them in fp64.
    """
    dtype = inputs[0].dtype
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.double().requires_grad_() for x in inputs]
    result, expected = operator(*ours), exact(*theirs)
    assert result.dtype == dtype and result.shape == expected.shape
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    result.backward(grad)
    expected.backward(grad.double())
    _assert_close(result, expected)
    for x, y in zip(ours, theirs, strict=True):
        assert x.grad.dtype == x.dtype
        _assert_close(x.grad, y.grad)


def _assert_close(result: Tensor, expected: Tensor) -> None:
    rounding = torch.finfo(result.dtype).eps / 2
    allowed = rounding * expected.abs() + _ARITHMETIC * expected.abs().max()
    excess = ((result.double() - expected).abs() / allowed).max()
    assert excess <= 1, f"{excess:.2f} times the error allowed"
