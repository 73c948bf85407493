from __future__ import annotations

import pytest
import torch

from mindspeed_lowp.emulator.optimizer import npu_apply_adam_w


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_steps_are_those_of_torch(amsgrad, maximize):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator)
    parameter = torch.nn.Parameter(weight.double())
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    theirs = torch.optim.AdamW([parameter], amsgrad=amsgrad, maximize=maximize, foreach=False, **options)
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    largest = torch.zeros_like(weight) if amsgrad else None
    for step in range(4):
        grad = torch.randn(5, 3, generator=generator)
        parameter.grad = grad.double()
        theirs.step()
        out = npu_apply_adam_w(
            0.8**step, 0.95**step, 1e-2, 0.1, 0.8, 0.95, 1e-6, grad, largest, amsgrad, maximize,
            out=(weight, m, v),
        )  # fmt: skip
        assert out[0] is weight and out[1] is m and out[2] is v
    torch.testing.assert_close(weight.double(), parameter.detach(), rtol=0, atol=1e-6)


def test_amsgrad_needs_its_state():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="amsgrad needs max_grad_norm"):
        npu_apply_adam_w(1, 1, 1e-3, 0, 0.9, 0.99, 1e-8, x, None, True, False, out=(x, x, x))
