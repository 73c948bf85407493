import torch

from mindspeed_lowp.memory import count_saved_bytes


def test_storages_count_once_and_parameters_not_at_all():
    x, w = torch.randn(8, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4, 4))
    with count_saved_bytes(w) as saved:
        y = x @ w  # saves x and w
        assert saved.total == x.numel() * 4
        z = x[:2] * x[2:4]  # saves two views of x
        assert saved.total == x.numel() * 4
        (y.exp().sum() + z.sum()).backward()  # exp saves its output
    assert saved.total == (x.numel() + y.numel()) * 4


def test_a_saved_parameter_comes_back_as_itself():
    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            (w,) = ctx.saved_tensors
            assert w is weight
            return grad @ w.T, None

    weight = torch.nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with count_saved_bytes(weight) as saved:
        y = Linear.apply(x, weight)
    y.sum().backward()
    assert saved.total == 0 and x.grad is not None
