"""`--delay-wgrad-compute`: weight gradients after the rest of backward, when Megatron asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from mindspeed_lowp.layers import DelayedWeightGrads


class DelaysWeightGrad:
    """A layer under one of Transformer Engine's names, by whose protocol the gradients are asked for.

    delayed: what the layer's products are left to; None when they are computed with the rest of backward.
    """

    delayed: DelayedWeightGrads | None = None

    def delay_weight_grads(self, weights: Iterable[nn.Parameter]) -> None:
        """From now on `backward_dw` settles these gradients.

        Data parallelism, which wraps the model later, reduces a gradient when autograd has accumulated it;
        for weights marked so it leaves its hook with the layer instead.
        """
        self.delayed = DelayedWeightGrads()
        self._when_settled: list[Callable[[], None]] = []
        for weight in weights:
            weight.skip_backward_post_hook = True

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Data parallelism's: one a weight, called once its gradient is there."""
        self._when_settled.append(hook)

    def backward_dw(self) -> None:
        """Compute what backward left, and hand the gradients on; without a recipe they are there already."""
        if self.delayed is None:
            return
        self.delayed.compute()
        for hook in self._when_settled:
            hook()
