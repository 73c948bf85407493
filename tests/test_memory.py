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
