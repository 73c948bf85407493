"""Interrupted and resumed training leaves the checkpoint that uninterrupted training does, to the bit."""

import itertools

import pytest

from ..checkpoint import assert_same, contents
from ..parallelism import RECIPES
from ..trainer import MOE, succeeded, train

FLAGS = (
    "--train-iters 6 --attention-dropout 0.1 --hidden-dropout 0.1 --save-interval 3 --num-layers 1".split()
)
# Saved by parameter: the default's buffers have gaps between parameters, of whatever was in that memory.
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
TWO = "--tensor-model-parallel-size 2"

EVERY = list(itertools.product(RECIPES, ("", TWO), ("", DISTRIBUTED)))
SAMPLE = [
    ("mxfp8, deferred", "", DISTRIBUTED),
    ("hif8", TWO, ""),
    ("delayed", TWO, DISTRIBUTED),
]
CASES = [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow) for case in EVERY]


def resumed_is_through(folder, flags, ranks):
    succeeded(train(folder, [*FLAGS, *flags, "--save", "through"], ranks=ranks))
    (folder / "through" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = [*FLAGS, *flags, "--load", "through", "--save", "resumed"]
    for run in succeeded(train(folder, resumed, ranks=ranks)):
        assert len(run.losses) == 3
    through = contents(folder / "through" / "iter_0000006")
    assert any("linear_fc1.weight" in key for key in through) and any("exp_avg" in key for key in through)
    assert_same(contents(folder / "resumed" / "iter_0000006"), through)
    return through


@pytest.mark.parametrize(("recipe", "parallel", "optimizer"), CASES)
def test_dense(tmp_path, recipe, parallel, optimizer):
    flags = [*RECIPES[recipe].split(), *parallel.split(), *optimizer.split()]
    through = resumed_is_through(tmp_path, flags, ranks=2 if parallel else 1)
    [history] = [value for key, value in through.items() if "linear_fc1._extra_state" in key]
    assert ("lowp_amax_history" in str(history)) == (recipe == "delayed")


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=() if name == "delayed" else pytest.mark.slow) for name in RECIPES],
)
def test_experts_divided_over_two_ranks(tmp_path, recipe):
    flags = [*RECIPES[recipe].split(), *MOE, "--expert-model-parallel-size", "2", "--global-batch-size", "4"]
    resumed_is_through(tmp_path, [*flags, "--moe-token-dispatcher-type", "alltoall"], ranks=2)
