"""Which checkpoints of a distributed optimizer are refused, and in which words."""

from argparse import Namespace

import pytest

from mindspeed_lowp.features.optimizer_order import check_order

RUN = {
    "transformer_impl": "local",
    "moe_grouped_gemm": True,
    "expert_model_parallel_size": 1,
    "use_distributed_optimizer": True,
    "finetune": False,
    "no_load_optim": None,
}


def check(kind="dp_reshardable", saved=(), **now):
    metadata = {"distrib_optim_sharding_type": kind} if kind else None
    state = {"args": Namespace(**{**RUN, **dict(saved)}), "content_metadata": metadata}
    check_order(state, Namespace(**{**RUN, **now}))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (
            {"transformer_impl": "transformer_engine"},
            "error: with --transformer-impl transformer_engine: the optimizer's state in this checkpoint can "
            "only be loaded with --transformer-impl local",
        ),
        ({"moe_grouped_gemm": False}, "error: without --moe-grouped-gemm: .* loaded with --moe-grouped-gemm"),
        (
            {"expert_model_parallel_size": 2},
            "error: with --expert-model-parallel-size 2: .* loaded with --expert-model-parallel-size 1",
        ),
    ],
)
def test_another_order_of_parameters_is_refused(now, words):
    with pytest.raises(SystemExit, match=words) as stopped:
        check(**now)
    assert "--dist-ckpt-optim-fully-reshardable" in str(stopped.value)
    assert "--no-load-optim" in str(stopped.value)
    # Where no state is loaded, or it is by parameter, the order does not matter.
    for harmless in ({"finetune": True}, {"no_load_optim": True}, {"use_distributed_optimizer": False}):
        check(**now, **harmless)
    for kind in ("fully_reshardable", "fully_sharded_model_space", None):
        check(kind, **now)


def test_the_same_order_is_loaded():
    check()
    check(saved={"lr": 1.0}, lr=2.0)
