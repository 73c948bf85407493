from __future__ import annotations

import pytest
import torch

from mindspeed_lowp.ops.gemm import bf16_gemm_is_native
from mindspeed_lowp.runtime import gemm


def check_gemm() -> None:
    gemm.install()  # on CPUs with bf16 instructions, which do without it, too
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        x, y = torch.randn(2, 5, 67).to(dtype), torch.randn(2, 67, 3).to(dtype)
        z = torch.randn(2, 5, 3).to(dtype)
        exact, half = x.double() @ y.double(), torch.finfo(dtype).eps / 2

        def check(result: torch.Tensor, expected: torch.Tensor, dtype=dtype, half=half) -> None:
            assert result.dtype == dtype
            # One rounding to 16 bits, and fp32 accumulation before it.
            torch.testing.assert_close(result.double(), expected, rtol=1.001 * half, atol=2e-5)

        check(x @ y, exact)
        check(x[0] @ y[0], exact[0])
        check(x[0] @ y[0].t().contiguous().t(), exact[0])
        check(torch.addmm(z[0], x[0], y[0], beta=0.5, alpha=2), 0.5 * z[0].double() + 2 * exact[0])
        check(torch.baddbmm(z, x, y, beta=0.5, alpha=2), 0.5 * z.double() + 2 * exact)
        check(torch.baddbmm(z * torch.nan, x, y, beta=0), exact)
        check(torch.nn.functional.linear(x, y[0].t(), z[0, 0]), x.double() @ y[0].double() + z[0, 0].double())
        check(torch.einsum("bik,bkj->bij", x, y), exact)

        x.requires_grad_()
        (x @ y).backward(z)
        check(x.grad, z.double() @ y.double().mT)

    a, b = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(a @ b, (a[:, :, None] * b).sum(1))
    assert torch.equal(
        torch.ones(2, 3, dtype=torch.int64) @ torch.ones(3, 2, dtype=torch.int64), torch.full((2, 2), 3)
    )
    assert (torch.empty(0, 4, dtype=torch.bfloat16) @ torch.empty(4, 2, dtype=torch.bfloat16)).shape == (0, 2)


def test_half_precision_products_are_rounded_once(emulated) -> None:
    emulated(check_gemm)


@pytest.mark.skipif(bf16_gemm_is_native(), reason="PyTorch's own kernels are fast here")
def test_it_is_installed_where_needed(emulated) -> None:
    emulated(check_is_installed)


def check_is_installed() -> None:
    assert gemm._library is not None
