"""Which checkpoints of a distributed optimizer are refused, and in which words."""

from argparse import Namespace

import pytest

from mindspeed_lowp.features.optimizer_order import check_order

RUN = {
    "transformer_impl": "local",
    "moe_grouped_gemm": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
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
            {"tensor_model_parallel_size": 1},
            "error: with --tensor-model-parallel-size 1: .* loaded with --tensor-model-parallel-size 2",
        ),
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
    for harmless in ({"finetune": True}, {"no_load_optim": True}):
        check(**now, **harmless)
    for kind in ("fully_reshardable", "fully_sharded_model_space", None):
        check(kind, **now)


@pytest.mark.parametrize("kind", ["dp_reshardable", "fully_reshardable", None])
@pytest.mark.parametrize(("before", "now"), [(True, False), (False, True)])
def test_another_kind_of_optimizer_is_refused(kind, before, now):
    words = {True: "with --use-distributed-optimizer", False: "without --use-distributed-optimizer"}
    message = f"error: {words[now]}: .* loaded {words[before]}. Do that; or leave .* --no-load-optim"
    with pytest.raises(SystemExit, match=message):
        check(kind, saved={"use_distributed_optimizer": before}, use_distributed_optimizer=now)
    check(kind, saved={"use_distributed_optimizer": before}, use_distributed_optimizer=now, finetune=True)


def test_the_same_order_is_loaded():
    check()
    check(saved={"lr": 1.0}, lr=2.0)
