"""Megatron's schedule that overlaps the experts' communication, and weight gradients left for later in it."""

import pytest

from ..parallelism import RECIPES
from ..trainer import MOE, succeeded, train

FLAGS = [*MOE, *"--train-iters 3 --global-batch-size 8 --expert-model-parallel-size 2".split()]
FLAGS += "--moe-token-dispatcher-type alltoall --transformer-impl transformer_engine".split()
OVERLAP = ["--overlap-moe-expert-parallel-comm"]
DELAY = [*OVERLAP, "--delay-wgrad-compute"]


def lose_what_is_delayed(model):
    from mindspeed_lowp.layers import DelayedWeightGrads

    DelayedWeightGrads.compute = lambda self: self._products.clear()


@pytest.mark.parametrize("recipe", ["mxfp8, deferred", "delayed"])
def test_nothing_changes_but_the_order(tmp_path, recipe):
    flags = [*FLAGS, *RECIPES[recipe].split()]
    expected = [run.losses for run in succeeded(train(tmp_path, flags, ranks=2))]
    assert len(expected[0]) == 3
    for more in (OVERLAP, DELAY):
        assert [run.losses for run in succeeded(train(tmp_path, [*flags, *more], ranks=2))] == expected


def test_every_linears_gradient_is_delayed(tmp_path):
    flags = [*FLAGS, *RECIPES["mxfp8"].split(), *DELAY, "--train-iters", "1"]
    for run in succeeded(train(tmp_path, flags, ranks=2, prepare=lose_what_is_delayed)):
        linears = {name: grad for name, grad in run.grads.items() if ".linear_" in name}
        weights = {name for name in linears if ".weight" in name}
        assert len(weights) == 2 * (2 + 2 * 2)  # layers, of two linears, and of two experts with two each
        assert {name for name, grad in linears.items() if not grad.any()} == weights
