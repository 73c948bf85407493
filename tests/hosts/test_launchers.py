"""Training started by torchrun, by its predecessor, on two nodes, and what happens when a rank fails."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 256 --transformer-impl local --bf16
    --num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 3 --log-interval 1 --eval-iters 0
    --eval-interval 1000 --num-workers 0 --fp8-format e4m3 --fp8-recipe mxfp8 --tensor-model-parallel-size 2
""".split()


@pytest.fixture
def environment() -> dict[str, str]:
    """Of two nodes on this machine: where they meet, and one thread for each process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **ours, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


class Started:
    """A process, and what it and its children print."""

    def __init__(self, command: list[object], environment: dict[str, str], **variables: str) -> None:
        self.output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env={**environment, **variables},
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )

    def finish(self, timeout: float = 120) -> str:
        """What was printed in the end; the process is killed when it takes too long."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"not finished after {timeout} s: {self.printed()[-3000:]}")
        return self.printed()

    def printed(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    @property
    def returncode(self) -> int:
        return self.process.returncode


def losses(output: str) -> list[str]:
    found = re.findall(r"lm loss: (\S+)", output)
    assert len(found) == 3, output[-3000:]
    return found


def test_launchers_and_nodes_start_the_same_training(environment):
    trains = ["-m", "mindspeed_lowp.run", SCRIPT, *FLAGS]
    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
    port = ["--master-port", environment["MASTER_PORT"]]
    expected = losses(Started([*launch, *port, *trains], environment).finish())

    node = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    node += ["--master-addr", environment["MASTER_ADDR"], *port]
    nodes = [Started([*node, "--node-rank", rank, *trains], environment) for rank in range(2)]
    assert losses([node.finish() for node in nodes][-1]) == expected


def test_launch_script_on_two_nodes(environment, tmp_path):
    """The script for Ascend nodes, with two of one process."""
    (tmp_path / "text.txt").write_text("What the launch script is to train with. " * 500)
    prefix = tmp_path / "data"
    prepare = [sys.executable, ROOT / "scripts" / "prepare_data.py", "--output", prefix, "--suffix", ".txt"]
    subprocess.run([*map(str, prepare), str(tmp_path)], check=True, capture_output=True)
    torchrun = tmp_path / "torchrun"  # of this environment, which may not be activated
    torchrun.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    sizes = {
        "NUM_LAYERS": 2, "HIDDEN_SIZE": 64, "FFN_HIDDEN_SIZE": 128, "NUM_HEADS": 4, "NUM_QUERY_GROUPS": 2,
        "SEQ_LENGTH": 32, "NUM_EXPERTS": 4, "GLOBAL_BATCH_SIZE": 2, "TRAIN_ITERS": 3, "SAVE_INTERVAL": 3,
        "NPUS_PER_NODE": 1, "TP": 1, "PP": 1, "EP": 2, "NNODES": 2,
    }  # fmt: skip
    settings = {
        **{name: str(value) for name, value in sizes.items()},
        "PRETRAIN_SCRIPT": str(SCRIPT),
        "TRANSFORMER_IMPL": "local",
        "DATA_PATH": f"{prefix}_text_document",
        "TOKENIZER_TYPE": "NullTokenizer",
        "TOKENIZER_MODEL": "none",
        "SAVE_DIR": str(tmp_path / "checkpoints"),
        "PATH": f"{tmp_path}{os.pathsep}{environment['PATH']}",
    }
    # What NullTokenizer needs besides, and no evaluation, for which there is little text.
    flags = "--vocab-size 256 --split 100,0,0 --eval-iters 0".split()
    command = ["bash", ROOT / "scripts" / "pretrain_gpt_mxfp8.sh", *flags]
    nodes = [Started(command, environment, **settings, NODE_RANK=str(rank)) for rank in range(2)]
    first, last = (node.finish() for node in nodes)
    assert "MX training active with recipe mxfp8" in first
    assert len(losses(last)) == 3 and [node.returncode for node in nodes] == [0, 0]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "3"


FAILING = f"""
import mindspeed_lowp.adaptor
import os, runpy
from megatron.training import training

train_step, calls = training.train_step, 0

def fails_once(*args, **kwargs):
    global calls
    calls += 1
    if calls == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has had enough")
    return train_step(*args, **kwargs)

training.train_step = fails_once
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_a_rank_that_fails_stops_the_others(environment, tmp_path):
    """By itself: no launcher looks after these two."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    ranks = [
        Started([sys.executable, script, *FLAGS], environment, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2")
        for rank in range(2)
    ]
    message = ranks[1].finish()
    assert "RuntimeError: rank 1 has had enough" in message and ranks[1].returncode == 1
    start = time.monotonic()
    output = ranks[0].finish(timeout=60)
    assert ranks[0].returncode != 0 and time.monotonic() - start < 60, output[-3000:]
