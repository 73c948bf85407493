from __future__ import annotations

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.emulator.casts import npu_dtype_cast, npu_format_cast

VALUES = torch.tensor([0.0, 1.0, -1.1, 447.0, 1e6, -3e-3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.bfloat16, torch.float64, torch.bool])
def test_dtypes_of_torch(dtype):
    assert torch.equal(npu_dtype_cast(VALUES, dtype), VALUES.to(dtype))


def test_numbers_of_dtypes():
    assert npu_dtype_cast(VALUES, 15).dtype == torch.bfloat16
    assert npu_dtype_cast(VALUES, 3).dtype == torch.int32


@pytest.mark.parametrize(
    ("code", "cast", "decode"),
    [
        (292, ops.cast_e4m3, ops.decode_e4m3),
        (torch.float8_e5m2, ops.cast_e5m2, ops.decode_e5m2),
        (290, ops.cast_hifloat8, ops.decode_hifloat8),
        (296, ops.cast_e2m1, ops.decode_e2m1),
    ],
)
def test_narrow_formats_both_ways(code, cast, decode):
    codes = npu_dtype_cast(VALUES, code)
    assert torch.equal(codes.view(torch.uint8), cast(VALUES).view(torch.uint8))
    assert torch.equal(npu_dtype_cast(codes, torch.float32, input_dtype=code), decode(codes))


def test_gradient_passes_a_cast():
    x = VALUES.clone().requires_grad_()
    npu_dtype_cast(x, torch.bfloat16).sum().backward()
    assert x.grad.eq(1).all()
    x = VALUES.bfloat16().requires_grad_()
    y = npu_dtype_cast(x, torch.float8_e4m3fn)
    y.backward(torch.ones_like(y, dtype=torch.float32))
    assert x.grad.eq(1).all() and x.grad.dtype == torch.bfloat16


def test_memory_formats_change_nothing():
    assert npu_format_cast(VALUES, 29) is VALUES
