import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_lowp import get_recipe, lowp_linear
from mindspeed_lowp.memory import saved_bytes


def test_storages_count_once_and_parameters_not_at_all():
    x, w = torch.randn(8, 4, requires_grad=True), torch.nn.Parameter(torch.randn(4, 4))
    y = x @ w  # saves x and w
    assert saved_bytes(y, [w]) == x.numel() * 4
    assert saved_bytes(y) == (x.numel() + w.numel()) * 4
    z = y.exp() + (x[:2] * x[2:4]).sum()  # saves exp's output, and two views of x
    assert saved_bytes(z, [w]) == (x.numel() + y.numel()) * 4


def counted_by_hooks(forward, parameters):
    seen = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in parameters}
    total = 0

    def pack(tensor):
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage  # held, so that no other storage takes its address
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    assert output.requires_grad
    return total


def test_the_count_is_that_of_saved_tensor_hooks():
    x, w = torch.randn(64, 64, requires_grad=True), torch.nn.Parameter(torch.randn(64, 64))
    recipe = get_recipe("mxfp8")

    def forward():
        y = torch.nn.functional.layer_norm(lowp_linear(x, w, None, recipe), (64,))
        y = torch.nn.functional.softmax(torch.cat([y, y.gelu() if hasattr(y, "gelu") else y * y]), -1)
        return checkpoint(lambda t: t.exp() @ w, y, use_reentrant=True).sum()

    assert saved_bytes(forward(), [w]) == counted_by_hooks(forward, [w]) > 0


def test_backward_works_afterwards():
    x = torch.randn(4, 4, requires_grad=True)
    y = (x @ x).exp().sum()
    saved_bytes(y)
    y.backward()
    assert x.grad is not None
