"""A checkpoint loaded by another number of ranks, and saved again at once, holds the same to the bit."""

import itertools

import pytest

from ..checkpoint import assert_same, contents
from ..parallelism import RECIPES
from ..trainer import MOE, succeeded, train

# The vocabulary is padded to a multiple of this times the tensor-parallel size: it must come to the same.
FLAGS = "--train-iters 2 --global-batch-size 4 --make-vocab-size-divisible-by".split()
# Saved by parameter; the default's format is for the same number of ranks.
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
EXPERTS = [*MOE, "--moe-token-dispatcher-type", "alltoall"]
WAYS = {
    "TP 1": (1, [*FLAGS, "256"]),
    "TP 2": (2, [*FLAGS, "128", "--tensor-model-parallel-size", "2"]),
    "EP 1": (1, [*FLAGS, "256", *EXPERTS]),
    "EP 2": (2, [*FLAGS, "256", *EXPERTS, "--expert-model-parallel-size", "2"]),
}
EVERY = list(
    itertools.product(
        [("TP 2", "TP 1"), ("TP 1", "TP 2"), ("EP 2", "EP 1"), ("EP 1", "EP 2")], RECIPES, ("", DISTRIBUTED)
    )
)
SAMPLE = [
    (("TP 2", "TP 1"), "delayed", ""),
    (("TP 1", "TP 2"), "blockwise", DISTRIBUTED),
    (("EP 2", "EP 1"), "hif8", DISTRIBUTED),
]
CASES = [
    pytest.param(
        *case,
        marks=() if case in SAMPLE else pytest.mark.slow,
        id=f"{' to '.join(case[0])}-{case[1]}{'-distributed' if case[2] else ''}",
    )
    for case in EVERY
]


def settings(optimizer):
    """Of every group of parameters, in one order whatever optimizers the groups are divided among."""
    parts = [optimizer[key] for key in optimizer if isinstance(key, int)] or [optimizer]
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "is_expert_parallel")}
        for part in parts
        for group in part["optimizer"]["param_groups"]
    ]
    steps = {part["optimizer"].get("state", {}).get("common_step") for part in parts}
    return sorted({str(sorted(group.items())) for group in groups}), {step and float(step) for step in steps}


@pytest.mark.parametrize(("ways", "recipe", "optimizer"), CASES)
def test_loaded_by_another_number_of_ranks(tmp_path, ways, recipe, optimizer):
    saved, loaded = (WAYS[way] for way in ways)
    flags = [*RECIPES[recipe].split(), *optimizer.split()]
    first = [*saved[1], *flags, "--save", "saved", "--save-interval", "2"]
    succeeded(train(tmp_path, first, ranks=saved[0]))
    again = [*loaded[1], *flags, "--load", "saved", "--save", "again", "--save-interval", "3"]
    succeeded(train(tmp_path, again, ranks=loaded[0]))

    before, after = (contents(tmp_path / folder / "iter_0000002") for folder in ("saved", "again"))
    assert settings(before["common.optimizer"]) == settings(after["common.optimizer"])
    before, after = (
        # Without which ranks had which random states.
        {key: value for key, value in state.items() if not key.startswith(("rng_state", "common.optimizer"))}
        for state in (before, after)
    )
    assert_same(after, before)
    assert sum("exp_avg_sq" in key for key in before) >= 10
    histories = [value for key, value in before.items() if "linear_fc1._extra_state" in key]
    has_history = {"lowp_amax_history" in str(value) for value in histories}
    assert has_history == {recipe == "delayed"}
