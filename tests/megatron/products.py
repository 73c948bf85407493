"""What the converted layers of a Megatron model multiply, recorded, and compared with float64 products."""

from __future__ import annotations

from torch import Tensor, nn

from mindspeed_lowp.recipes import Recipe

from ..layers.oracle import assert_product, quantized


class Recorded:
    """Input and output of one layer's last call; their gradients once backward is through.

    Of a grouped layer also the rows of each expert.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        layer.register_forward_hook(self._note)

    def _note(self, layer: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        self.x, self.y = inputs[0], output[0] if isinstance(output, tuple) else output
        self.counts = [int(count) for count in inputs[-1]] if len(inputs) > 1 else None
        for tensor in (self.x, self.y):
            if tensor.requires_grad:
                tensor.retain_grad()


def rows(x: Tensor) -> Tensor:
    """[s, b, N] -> [s * b, N]"""
    return x.detach().reshape(-1, x.shape[-1])


def assert_linear(record: Recorded, recipe: Recipe, bias: Tensor | None = None) -> None:
    """All three products of a linear that communicates nothing."""
    weight = record.layer.weight
    x, g = rows(record.x), rows(record.y.grad).contiguous()
    w1, w2 = (quantized(recipe, weight.detach(), "weight", axis) for axis in (-1, -2))
    assert_product(rows(record.y), quantized(recipe, x, "input", -1), w1.mT, bias)
    assert_product(rows(record.x.grad), quantized(recipe, g, "grad", -1), w2)
    assert_product(
        weight.grad, quantized(recipe, g, "grad", -2).mT, quantized(recipe, x.contiguous(), "input", -2)
    )


def assert_experts(record: Recorded, weights: list[Tensor], grads: list[Tensor], recipe: Recipe) -> None:
    """The three products of each expert; weights and their gradients [N, K]."""
    start = 0
    for weight, dw, count in zip(weights, grads, record.counts, strict=True):
        part = slice(start, start + count)
        start += count
        x, g = record.x.detach()[part], record.y.grad[part]
        w1, w2 = (quantized(recipe, weight.contiguous(), "weight", axis) for axis in (-1, -2))
        if not count:
            assert not dw.any()
            continue
        assert_product(record.y.detach()[part], quantized(recipe, x, "input", -1), w1.mT)
        assert_product(record.x.grad[part], quantized(recipe, g, "grad", -1), w2)
        assert_product(dw, quantized(recipe, g, "grad", -2).mT, quantized(recipe, x, "input", -2))
