"""`python -m mindspeed_lowp.run` with the unmodified pretrain_gpt.py of a Megatron-LM checkout.

MEGATRON_LM_PATH names the checkout, of core_v0.12.1, core_v0.16.1 or core_v0.17.1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("MEGATRON_LM_PATH")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM")

# Mock data has tokens up to 4096 in some versions.
MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 4200 --transformer-impl local --bf16
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --train-iters 8 --log-interval 1
    --eval-iters 0 --eval-interval 1000
    --attention-dropout 0 --hidden-dropout 0 --num-workers 0 --use-cpu-initialization
""".split()
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8".split()
EXPERTS = {
    "dense": [],
    "sequential": "--num-experts 4 --moe-router-topk 2 --disable-bias-linear".split(),
    "grouped": "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear".split(),
}
# Divisors that pad the vocabulary to the same size.
ONE = "--make-vocab-size-divisible-by 256".split()
TWO = "--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2".split()


def train(flags: list[str], ranks: int = 1) -> tuple[str, list[str]]:
    """What the run printed, and the losses as Megatron prints them."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = ["-m", "mindspeed_lowp.run", str(Path(CHECKOUT) / "pretrain_gpt.py")]
    command = [sys.executable, "-W", "ignore", *(launch if ranks > 1 else []), *script, *MODEL, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    losses = re.findall(r"lm loss: (\S+)", run.stdout)
    assert len(losses) == 8
    return run.stdout, losses


@pytest.mark.parametrize("experts", EXPERTS)
def test_trains_in_mxfp8(experts):
    flags = [*ONE, *EXPERTS[experts]]
    output, losses = train([*flags, *MXFP8])
    assert "MX training active with recipe mxfp8\n" in output
    assert f"Swapped to MXLinear_NPU layers: {dict(dense=8, sequential=20, grouped=4)[experts]}\n" in output
    if experts == "grouped":
        assert "[MXFP8/HiF8 GMM] Replaced 4 NPU GMM methods/functions\n" in output

    assert train([*flags, *MXFP8, "--mxfp8-defer-backward-quant"])[1] == losses
    _, high_precision = train(flags)
    assert high_precision != losses  # or the flags would be without effect
    assert [float(x) for x in high_precision] == pytest.approx([float(x) for x in losses], rel=0.01)


@pytest.mark.parametrize("experts", EXPERTS)
def test_two_ranks_train_like_one(experts):
    flags = [*MXFP8, *EXPERTS[experts]]
    _, one = train([*ONE, *flags])
    flags += [*TWO, *(["--sequence-parallel"] if EXPERTS[experts] else [])]
    _, two = train(flags, ranks=2)
    assert [float(x) for x in two] == pytest.approx([float(x) for x in one], rel=2e-3)
    assert train([*flags, "--mxfp8-defer-backward-quant"], ranks=2)[1] == two
