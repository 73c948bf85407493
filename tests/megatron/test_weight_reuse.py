"""Weights quantized once a step: the same training to the bit, whatever writes the weights, and counted."""

import pytest
import torch

from ..trainer import MOE, MXFP8, succeeded, train

REUSE = ["--fp8-reuse-quantized-weight"]
# Deferral changes no bit, so that it can be tried along with the check.
CHECKED = [*REUSE, "--lowp-check-reused-weights", "--mxfp8-defer-backward-quant"]
MICRO_BATCHES = 4
STEPS = 3
FULL = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SEQUENTIAL = " ".join(flag for flag in MOE if flag != "--moe-grouped-gemm")
GROUPED = " ".join(MOE)
EVALUATE = " --eval-interval 2 --eval-iters 2"
OVERLAP = " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PIPELINE = " --num-layers 4 --pipeline-model-parallel-size 2"
ENGINE = " --transformer-impl transformer_engine"

# Weights: four linears a layer; of experts two in attention and two for each of the four.
VARIANTS = {
    "float16-optimizer": ("--bf16", EVALUATE, 1, 8),
    "fp32-optimizer": ("", FULL, 1, 8),
    "skipped-steps": ("--fp16", " --initial-loss-scale 1e6 --hysteresis 1", 1, 8),  # the first overflows
    "sgd": ("--bf16", f" --optimizer sgd {GROUPED}" + FULL, 1, 20),
    "gather": ("--bf16", f" --use-distributed-optimizer --recompute-activations {SEQUENTIAL}", 2, 20),
    "overlapped-gather": ("--bf16", f"{OVERLAP} {GROUPED}" + EVALUATE, 2, 20),
    "pipeline": ("", OVERLAP + PIPELINE + ENGINE, 2, 8),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_is_the_same_to_the_bit(tmp_path, variant):
    precision, flags, ranks, weights = VARIANTS[variant]
    batch = 2 * MICRO_BATCHES * (1 if PIPELINE in flags else ranks)
    flags = [*MXFP8, *flags.split(), "--global-batch-size", str(batch), "--train-iters", str(STEPS)]
    runs = {}
    for name, reuse in {"plain": [], "reuse": REUSE, "checked": CHECKED}.items():
        (tmp_path / name).mkdir()
        runs[name] = succeeded(train(tmp_path / name, [*flags, *reuse], ranks=ranks, precision=precision))
    assert ("skipped iterations:   1" in runs["plain"][0].output) == (variant == "skipped-steps")
    for plain, *others in zip(*runs.values(), strict=True):
        assert plain.losses or ranks == 2
        for other in others:
            assert other.losses == plain.losses
            for kind in ("last", "grads"):
                expected, got = getattr(plain, kind), getattr(other, kind)
                assert expected and got.keys() == expected.keys()
                assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        reusing, checked = others
        assert reusing.quantized == [{-1: weights, -2: weights}] * STEPS
        for a, b in zip(plain.quantized, checked.quantized, strict=True):
            assert a[-1] == b[-1] >= MICRO_BATCHES * weights and b[-2] >= MICRO_BATCHES * weights == a[-2]


def test_it_says_so_and_how_much_is_held(tmp_path):
    [run] = succeeded(train(tmp_path, [*MXFP8, *CHECKED, "--train-iters", "2"]))
    assert run.output.count("Quantized weights are reused within each step, and checked\n") == 1
    # Of two layers of hidden size 64: elements, and one scale in 32 of them.
    elements = 2 * 64 * (3 * 64 + 64 + 256 + 256)
    held = 2 * (elements + elements // 32)
    assert run.output.count(f"held for reuse until the optimizer step: {held} bytes\n") == 1
