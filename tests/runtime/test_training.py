"""Megatron's trainer on this machine: what must be equal is equal, from one process to two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RECORDED = Path(__file__).with_name("recorded_pretraining.py")

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --transformer-impl local
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3 --eval-iters 0 --eval-interval 100
    --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization
""".split()
ONE = "--make-vocab-size-divisible-by 256".split()
TWO = "--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2".split()


def train(folder: Path, *flags: str, processes: int = 1) -> list[dict[str, Any]]:
    """Run the training script; return the record of each process."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
    command = [*launcher, str(RECORDED), str(folder / "record"), *FLAGS, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return [torch.load(folder / f"record.{rank}") for rank in range(processes)]


@pytest.mark.parametrize(
    "flags",
    [
        # Masks of the residual stream are drawn outside the tensor-parallel region: the same on every rank.
        pytest.param("--hidden-dropout 0.1", id="plain"),
        pytest.param("--sequence-parallel --bf16 --normalization RMSNorm", id="sequence-parallel"),
    ],
)
def test_two_ranks_train_like_one(tmp_path: Path, flags: str) -> None:
    [one] = train(tmp_path, *ONE, *flags.replace("--sequence-parallel", "").split())
    left, right = train(tmp_path, *TWO, *flags.split(), processes=2)

    assert len(one["losses"]) == 20
    assert one["losses"][0] > 5 and one["losses"][-1] < one["losses"][0] - 0.3
    tolerance = 5e-3 if "--bf16" in flags else 1e-5
    for record in (left, right):
        torch.testing.assert_close(record["losses"], one["losses"], rtol=tolerance, atol=0)

    replicated = set(left["first"]) - left["sharded"]
    assert len(replicated) >= 8 and len(left["sharded"]) >= 9
    for when in ("first", "last"):
        for name in replicated:
            assert torch.equal(left[when][name], right[when][name]), (when, name)
        for name in left["sharded"]:
            if "bias" not in name or when == "last":
                assert not torch.equal(left[when][name], right[when][name]), (when, name)
    for name in replicated:
        assert not torch.equal(left["first"][name], left["last"][name]), name


@pytest.mark.parametrize(
    ("flags", "flags_after"),
    [
        pytest.param("", "", id="plain"),
        pytest.param(
            "--use-distributed-optimizer --bf16",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            id="distributed-optimizer-and-recomputation",
        ),
    ],
)
def test_resumed_training_is_the_same_to_the_bit(tmp_path: Path, flags: str, flags_after: str) -> None:
    common = f"{flags} --train-iters 6 --attention-dropout 0.1 --hidden-dropout 0.1".split()
    [through] = train(tmp_path, *ONE, *common, "--save", "checkpoint", "--save-interval", "3")
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
    [resumed] = train(tmp_path, *ONE, *common, *flags_after.split(), "--load", "checkpoint")

    assert len(through["losses"]) == 6 and len(resumed["losses"]) == 3
    assert resumed["losses"] == through["losses"][3:]
    for name, parameter in through["last"].items():
        assert torch.equal(parameter, resumed["last"][name]), name
