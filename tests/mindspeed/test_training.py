"""Megatron-LM's unmodified pretrain_gpt.py: MindSpeed alone, and with this package, to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

STEPS = 20
MODEL = f"""
    --mock-data --tokenizer-type NullTokenizer --vocab-size 4600 --transformer-impl transformer_engine
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 2 --train-iters {STEPS} --lr 1e-3 --eval-iters 0
    --eval-interval 1000 --attention-dropout 0 --hidden-dropout 0 --num-workers 0 --bf16 --use-flash-attn
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --no-masked-softmax-fusion --use-fused-swiglu --use-fused-rmsnorm
""".split()
MOE = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall".split()
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8".split()
HIF8 = "--fp8-format hif8 --fp8-recipe tensorwise".split()
DEFER = ["--mxfp8-defer-backward-quant"]
PERFORMANCE = "--te-gmm-mode performance --gemm-gradient-accumulation-fusion".split()

Train = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Train:
    """train(how, *flags): what a run (its first rank) left; each run once."""
    done: dict[tuple, SimpleNamespace] = {}

    def train(how: str, *flags: str, ranks: int = 1) -> SimpleNamespace:
        if (how, *flags) not in done:
            folder = tmp_path_factory.mktemp(how)
            launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
            result = subprocess.run(
                [
                    *(sys.executable, "-m", *(launcher if ranks > 1 else ())),
                    *("tests.mindspeed.trainer", how, folder / "record.pt", *MODEL, *flags),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=280,
            )
            assert result.returncode == 0, result.stdout[-4000:]
            record = torch.load(folder / "record.pt")
            done[(how, *flags)] = SimpleNamespace(output=result.stdout, **record)
        return done[(how, *flags)]

    return train


def assert_same(run: SimpleNamespace, other: SimpleNamespace) -> None:
    assert len(run.losses) == STEPS and run.losses == other.losses
    assert run.parameters.keys() == other.parameters.keys()
    assert all(torch.equal(p, other.parameters[name]) for name, p in run.parameters.items())


def assert_learns_otherwise_than_bf16(train: Train, run: SimpleNamespace, *model: str) -> None:
    high = train("alone", *model)
    assert run.losses != high.losses
    assert run.losses[-1] == pytest.approx(high.losses[-1], rel=2e-3) and run.losses[-1] < run.losses[0] - 0.1


@pytest.mark.parametrize("flags", [MXFP8, [*MXFP8, *MOE], [*MXFP8, *MOE, *PERFORMANCE], HIF8], ids=" ".join)
def test_recipes_are_those_of_mindspeed(train, flags):
    alone, ours = train("alone", *flags), train("ours", *flags)
    assert_same(ours, alone)
    recipe = "hif8" if flags is HIF8 else "mxfp8"
    assert f"MX training active with recipe {recipe}\n" in ours.output
    layers = 8 if "--num-experts" not in flags else 4
    assert f"Swapped to MXLinear_NPU layers: {layers}\n" in ours.output
    assert ("[MXFP8/HiF8 GMM] Replaced 4 NPU GMM methods/functions" in ours.output) == (layers == 4)
    assert "MX training active" not in alone.output
    assert_learns_otherwise_than_bf16(train, ours, *flags[4:])


@pytest.mark.parametrize("model", [[], MOE, [*MOE, *PERFORMANCE]], ids=" ".join)
@pytest.mark.parametrize("reuse", [[], ["--fp8-reuse-quantized-weight"]], ids=" ".join)
def test_deferral_keeps_less_and_changes_nothing(train, model, reuse):
    dual = train("ours", *MXFP8, *model)
    deferred = train("ours", *MXFP8, *model, *DEFER, *reuse)
    assert_same(deferred, dual)
    # One byte a weight of the blocks, and a scale for each 32; the rest of both is the same.
    saved = dual.saved_bytes - deferred.saved_bytes
    weights = sum(
        p.numel() for name, p in deferred.parameters.items() if "linear" in name and "norm" not in name
    )
    assert saved == weights + weights // 32


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-model-parallel-size", "2"],
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        [*MOE, "--expert-model-parallel-size", "2", "--global-batch-size", "4"],
        # Experts one by one, which MindSpeed multiplies by functions of their own.
        [word for word in MOE if word != "--moe-grouped-gemm"]
        + ["--expert-model-parallel-size", "2", "--global-batch-size", "4"],
    ],
    ids=" ".join,
)
def test_two_ranks(train, flags):
    alone = train("alone", *MXFP8, *flags, ranks=2)
    assert_same(train("ours", *MXFP8, *flags, *DEFER, ranks=2), alone)


def test_mindspeed_alone_reuses_the_same_weights(train):
    flags = [*MXFP8, "--fp8-reuse-quantized-weight"]
    assert_same(train("ours", *flags), train("alone", *flags))


def test_adaptor_after_that_of_mindspeed(train):
    assert_same(train("late", *MXFP8, *DEFER), train("ours", *MXFP8))


def test_hifloat8_with_a_scale_for_each_expert(train):
    """By design not MindSpeed's, whose experts share a scale and whose amax goes to 32768."""
    ours = train("ours", "--fp8-recipe", "hif8", *MOE)
    assert ours.losses != train("alone", *HIF8, *MOE).losses
    assert_same(ours, train("ours", *HIF8, *MOE))
    assert "hif8 MoE training enabled" in ours.output


def test_filters_and_a_file(train, tmp_path):
    kept = train("ours", *MXFP8, "--lowp-filter-fqns", "linear_fc2")
    assert "Swapped to MXLinear_NPU layers: 6\n" in kept.output
    assert "Kept in high precision: decoder.layers.0.mlp.linear_fc2, decoder.layers.1.mlp" in kept.output
    file = tmp_path / "lowp.toml"
    file.write_text("""
[model]
converters = ["npu_gmm", "quantize.linear.mx", "quantize.grouped_mm.mx"]
[quantize.linear.mx]
recipe_name = "mxfp8"
filter_fqns = ["linear_fc2", "router.gate"]
[quantize.grouped_mm.mx]
recipe_name = "hif8"
""")
    assert_same(train("ours", "--lowp-config", str(file)), kept)
    both = train("ours", "--lowp-config", str(file), *MOE)
    assert (
        "MX training active with recipe mxfp8\n" in both.output and "hif8 MoE training enabled" in both.output
    )


def test_experts_in_high_precision(train):
    """MindSpeed accepts the flag and quantizes them all the same."""
    flags = [*MXFP8, *MOE, "--no-use-gmm-fp8"]
    ours = train("ours", *flags)
    assert ours.losses != train("ours", *MXFP8, *MOE).losses
    assert train("alone", *flags).losses == train("alone", *MXFP8, *MOE).losses
    assert "decoder.layers.0.mlp.experts.linear_fc1" in ours.output.partition("Kept in high precision")[2]
