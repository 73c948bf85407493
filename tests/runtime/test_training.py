"""Megatron's trainer on this machine: what must be equal is equal, from one process to two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..trainer import succeeded, train

ONE = "--make-vocab-size-divisible-by 256 --use-cpu-initialization --train-iters 20".split()
TWO = [*ONE, *"--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2".split()]


@pytest.mark.parametrize(
    ("precision", "flags", "tolerance"),
    [
        # Masks of the residual stream are drawn outside the tensor-parallel region: the same on every rank.
        pytest.param("", ["--hidden-dropout", "0.1"], 1e-5, id="plain"),
        pytest.param("--bf16", ["--sequence-parallel", "--normalization", "RMSNorm"], 5e-3, id="sp"),
    ],
)
def test_two_ranks_train_like_one(tmp_path: Path, precision: str, flags: list[str], tolerance: float) -> None:
    one_rank = [flag for flag in flags if flag != "--sequence-parallel"]
    [one] = succeeded(train(tmp_path, [*ONE, *one_rank], precision=precision))
    left, right = succeeded(train(tmp_path, [*TWO, *flags], ranks=2, precision=precision))

    assert len(one.losses) == 20 and one.losses[0] > 5 and one.losses[-1] < one.losses[0] - 0.3
    for run in (left, right):
        torch.testing.assert_close(run.losses, one.losses, rtol=tolerance, atol=0)

    replicated = left.first.keys() - left.sharded
    assert len(replicated) >= 8 and len(left.sharded) >= 9
    for moment in ("first", "last"):
        on_left, on_right = getattr(left, moment), getattr(right, moment)
        for name in replicated:
            assert torch.equal(on_left[name], on_right[name]), (moment, name)
        for name in left.sharded:
            if "bias" not in name or moment == "last":
                assert not torch.equal(on_left[name], on_right[name]), (moment, name)
    for name in replicated:
        assert not torch.equal(left.first[name], left.last[name]), name


@pytest.mark.parametrize(
    ("precision", "flags", "flags_after"),
    [
        pytest.param("", "", "", id="plain"),
        pytest.param(
            "--bf16",
            "--use-distributed-optimizer",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            id="distributed-optimizer-and-recomputation",
        ),
    ],
)
def test_resumed_training_is_the_same_to_the_bit(
    tmp_path: Path, precision: str, flags: str, flags_after: str
) -> None:
    common = [*flags.split(), *"--train-iters 6 --attention-dropout 0.1 --hidden-dropout 0.1".split()]
    common += ["--num-workers", "2"]  # whose seeds must not disturb what is drawn on the device
    save = ["--save", "checkpoint", "--save-interval", "3"]
    [through] = succeeded(train(tmp_path, [*ONE, *common, *save], precision=precision))
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
    load = [*flags_after.split(), "--load", "checkpoint"]
    [resumed] = succeeded(train(tmp_path, [*ONE, *common, *load], precision=precision))

    assert len(through.losses) == 6 and resumed.losses == through.losses[3:]
    for name, parameter in through.last.items():
        assert torch.equal(parameter, resumed.last[name]), name


def test_a_pipeline_trains_like_one_stage(tmp_path: Path) -> None:
    """From one checkpoint: activations must arrive as they were sent, whenever the sender frees them."""
    common = [*ONE, "--num-layers", "4", "--global-batch-size", "8", "--untie-embeddings-and-output-weights"]
    succeeded(
        train(tmp_path, [*common, "--train-iters", "1", "--save", "checkpoint", "--save-interval", "1"])
    )
    load = ["--train-iters", "4", "--load", "checkpoint", "--finetune"]
    [one] = succeeded(train(tmp_path, [*common, *load]))
    pipeline = [*common, *load, "--pipeline-model-parallel-size", "2"]
    for interleaved in ([], ["--num-layers-per-virtual-pipeline-stage", "1"]):
        first, last = succeeded(train(tmp_path, [*pipeline, *interleaved], ranks=2))
        assert first.losses == [] and len(last.losses) == 4
        # The gradient's norm, by which it is clipped, is summed stage by stage.
        torch.testing.assert_close(last.losses, one.losses, rtol=1e-6, atol=0)
