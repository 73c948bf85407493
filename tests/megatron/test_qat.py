"""Quantization-aware training in Megatron: what it computes, in which combinations, and what it saves."""

import pytest
import torch

from mindspeed_lowp.qat import mxfp4_quant_dequant, mxfp4_saturation_mask

from ..trainer import MOE, MXFP8, succeeded, train

QAT = ["--qat-scheme", "w4a16-mxfp4"]
CLIPPED = ["--qat-scheme", "w4a4-mxfp4", "--qat-clip-grad"]
DEFER = ["--mxfp8-defer-backward-quant"]
UNFUSED = ["--no-gradient-accumulation-fusion"]
STEPS = ["--train-iters", "3"]
ENGINE = ["--transformer-impl", "transformer_engine"]
SEQUENCE_PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(folder, flags, ranks=1, precision="--bf16"):
    return succeeded(train(folder, [*flags, *STEPS], ranks, precision))[-1].losses


@pytest.mark.parametrize(
    ("experts", "scheme"), [([], "w4a4-mxfp4"), (MOE, "w8a16-mxfp8")], ids=["dense", "moe"]
)
def test_losses_move_away_from_bf16_but_not_far(tmp_path, experts, scheme):
    bf16 = losses(tmp_path, experts)
    [run] = succeeded(train(tmp_path, [*experts, *STEPS, "--qat-scheme", scheme]))
    assert run.losses != bf16
    torch.testing.assert_close(run.losses, bf16, rtol=0.02, atol=0)
    layers = "4 linears, 4 grouped" if experts else "8 linears, 0 grouped"
    kept = "every MoE router, output_layer" if experts else "output_layer"
    for line in (
        f"QAT active with scheme {scheme}: scales by {'floor' if experts else 'round'}\n",
        f"Fake-quantized layers: {layers}; multiplied in high precision\n",
        f"Not fake-quantized: {kept}\n",
    ):
        assert run.output.count(line) == 1, line


@pytest.mark.parametrize(
    ("flags", "experts"), [(QAT, []), (CLIPPED, []), (CLIPPED, MOE)], ids=["dense", "clipped", "clipped-moe"]
)
def test_fusion_and_accumulation_leave_the_numbers(tmp_path, flags, experts):
    """One step of two micro-batches, fused and not: the same up to the rounding of unfused bf16 gradients."""
    batch = [*experts, *flags, "--global-batch-size", "4", "--train-iters", "1"]
    [fused] = succeeded(train(tmp_path, batch))
    [unfused] = succeeded(train(tmp_path, [*batch, *UNFUSED]))
    assert fused.losses == unfused.losses
    for name, grad in fused.grads.items():
        torch.testing.assert_close(unfused.grads[name], grad, rtol=0.02, atol=2e-4, msg=name)
        if "linear_fc1" in name and grad.dim() == 2:
            saturated = mxfp4_saturation_mask(fused.first[name])
            assert saturated.any()
            if flags is CLIPPED:
                assert not unfused.grads[name][saturated].any() and not grad[saturated].any()
            if not experts:  # which may have had no token, and zeros from that
                assert torch.equal(grad == 0, saturated & (flags is CLIPPED))


@pytest.mark.parametrize(
    ("flags", "fusion", "tolerance"),
    [(QAT, [], 1e-5), (CLIPPED, UNFUSED, 1e-3), ([*QAT, *MXFP8], [], 1e-3)],
    ids=["w4a16", "w4a4-clipped-unfused", "over-mxfp8"],
)
def test_sequence_parallelism_leaves_the_losses(tmp_path, flags, fusion, tolerance):
    """In fp32; quantized inputs are sums in another order, some of which round to another code."""
    flags = [*flags, "--use-cpu-initialization", "--make-vocab-size-divisible-by"]
    alone = losses(tmp_path, [*flags, "256"], precision="")
    parallel = losses(tmp_path, [*flags, "128", *SEQUENCE_PARALLEL, *fusion], ranks=2, precision="")
    torch.testing.assert_close(parallel, alone, rtol=tolerance, atol=0)


def test_over_an_fp8_recipe_deferral_and_reuse_leave_every_bit(tmp_path):
    common = [*MXFP8, *ENGINE, *MOE, *STEPS, "--global-batch-size", "4"]
    flags = [*QAT, *common]
    [plain] = succeeded(train(tmp_path, flags))
    assert "multiplied in mxfp8\n" in plain.output
    reuse = ["--fp8-reuse-quantized-weight", "--lowp-check-reused-weights"]
    for more in (DEFER, [*DEFER, *reuse]):
        [run] = succeeded(train(tmp_path, [*flags, *more]))
        assert run.losses == plain.losses and equal(run.last, plain.last)
    [mxfp8] = succeeded(train(tmp_path, common))
    assert mxfp8.losses != plain.losses


def test_names_that_are_skipped_and_experts_alone(tmp_path):
    only = ["--qat-scheme", "w4a16-mxfp4-moe-only"]
    [run] = succeeded(train(tmp_path, [*MOE, *only, "--qat-skip-names", "layers.1.", "--train-iters", "1"]))
    assert "Fake-quantized layers: 0 linears, 2 grouped; multiplied in high precision" in run.output
    [mixed] = succeeded(train(tmp_path, [*MOE, *only, *MXFP8, "--train-iters", "1"]))
    assert "Swapped to MXLinear_NPU layers: 4" in mixed.output
    assert "Fake-quantized layers: 0 linears, 4 grouped; multiplied in mxfp8" in mixed.output
    [wrong] = train(tmp_path, [*QAT, "--qat-skip-names", "linear_fc3", "--train-iters", "1"])
    assert wrong.exit_code == 1
    assert (
        "error: --qat-skip-names: 'linear_fc3' is in no layer's name; the nearest: linear_fc" in wrong.output
    )


@pytest.mark.parametrize(
    "flags",
    [[*CLIPPED, "--use-distributed-optimizer"], [*QAT, *MXFP8, *DEFER, *MOE]],
    ids=["clipped", "moe-over-mxfp8"],
)
def test_resumed_training_is_the_same_to_the_bit(tmp_path, flags):
    save = ["--save", "checkpoint", "--save-interval", "3"]
    [through] = succeeded(train(tmp_path, [*flags, "--train-iters", "5", *save]))
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("3")
    [resumed] = succeeded(train(tmp_path, [*flags, "--train-iters", "5", "--load", "checkpoint"]))
    assert resumed.losses == through.losses[3:] and equal(resumed.last, through.last)


def test_from_a_bf16_checkpoint_and_back(tmp_path):
    """Its checkpoints are ordinary ones: of bf16 parameters that the optimizer moved, not of grid values."""
    [bf16] = succeeded(train(tmp_path, ["--train-iters", "3", "--save", "bf16", "--save-interval", "3"]))
    tuning = ["--load", "bf16", "--finetune", "--save", "qat", "--save-interval", "2", "--train-iters", "2"]
    [qat] = succeeded(train(tmp_path, [*CLIPPED, *tuning]))
    assert equal(qat.first, bf16.last)
    [back] = succeeded(train(tmp_path, ["--load", "qat", "--finetune", "--train-iters", "1"]))
    assert equal(back.first, qat.last)
    for name, weight in qat.last.items():
        if "linear" in name and weight.dim() == 2:
            assert not torch.equal(weight, qat.first[name])
            assert not torch.equal(weight, mxfp4_quant_dequant(weight))
