"""Megatron's trainer in MXFP8: deferral, recomputation, accumulation, two ranks, and a user's mistakes."""

import pytest
import torch

from ..trainer import MOE, MXFP8, succeeded, train

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
ACCUMULATE = "--global-batch-size 4".split()  # of micro-batches of two
DEFER = ["--mxfp8-defer-backward-quant"]
DEFER_ALL = [*DEFER, "--mxfp8-defer-operands", "all"]
STEPS = 52


@pytest.mark.parametrize("accumulate", [[], ACCUMULATE], ids=["one-batch", "accumulate"])
@pytest.mark.parametrize("recompute", [[], RECOMPUTE], ids=["kept", "recompute"])
@pytest.mark.parametrize("experts", [[], MOE], ids=["dense", "moe"])
def test_deferred_training_is_the_same_to_the_last_bit(tmp_path, experts, recompute, accumulate):
    flags = [*MXFP8, *experts, *recompute, *accumulate, "--train-iters", str(STEPS)]
    results = []
    for name, policy in {"dual": [], "weight": DEFER, "all": DEFER_ALL}.items():
        (tmp_path / name).mkdir()
        results += succeeded(train(tmp_path / name, [*flags, *policy]))
    dual = results[0]
    assert len(dual.losses) == STEPS and dual.losses[-1] < dual.losses[0] - 0.5
    for other in results[1:]:
        assert other.losses == dual.losses
        for kind in ("first", "last", "grads"):
            expected = getattr(dual, kind)
            assert expected and getattr(other, kind).keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(getattr(other, kind)[name], tensor), (kind, name)


def test_mxfp8_differs_from_bf16_and_stays_near_it(tmp_path):
    """Were the flags without effect, the losses would be equal."""
    runs = {}
    for name, flags in {"bf16": [], "e4m3": MXFP8, "hybrid": [*MXFP8, "--fp8-format", "hybrid"]}.items():
        (tmp_path / name).mkdir()
        [runs[name]] = succeeded(train(tmp_path / name, [*flags, "--train-iters", "20"]))
    assert runs["e4m3"].losses != runs["bf16"].losses
    assert runs["hybrid"].losses[0] == runs["e4m3"].losses[0]  # only gradients differ
    assert runs["hybrid"].losses[1:] != runs["e4m3"].losses[1:]
    for name in ("e4m3", "hybrid"):
        torch.testing.assert_close(runs[name].losses, runs["bf16"].losses, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("experts", "sequence_parallel"),
    [
        pytest.param([], [], id="dense"),
        pytest.param([], ["--sequence-parallel"], id="dense-sp"),
        pytest.param(MOE, ["--sequence-parallel"], id="moe-sp"),  # Megatron wants it of experts
    ],
)
def test_two_ranks_train_like_one(tmp_path, experts, sequence_parallel):
    flags = [*MXFP8, *DEFER, *experts, "--train-iters", "20", "--use-cpu-initialization"]
    (tmp_path / "one").mkdir()
    [one] = succeeded(train(tmp_path / "one", [*flags, "--make-vocab-size-divisible-by", "256"]))
    two = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 128".split()
    left, right = succeeded(train(tmp_path, [*flags, *two, *sequence_parallel], ranks=2))

    assert left.losses == right.losses and one.losses[-1] < one.losses[0] - 0.3
    # Ranks round their partial sums to bf16 before they add them: up to 1e-3 was seen.
    torch.testing.assert_close(left.losses, one.losses, rtol=2e-3, atol=0)
    replicated = left.first.keys() - left.sharded
    assert len(replicated) >= 8 and len(left.sharded) >= 5
    for moment in ("first", "last"):
        for name in replicated:
            assert torch.equal(getattr(left, moment)[name], getattr(right, moment)[name]), (moment, name)


def test_start_up_says_what_was_done(tmp_path):
    filters = ["--lowp-filter-fqns", "layers.0.self_attention"]
    [run] = succeeded(train(tmp_path, [*MXFP8, *MOE, *filters, "--train-iters", "1"]))
    for line in (
        "mxfp8 is emulated on this device (cpu)",
        "MX training active with recipe mxfp8\n",
        "Swapped to MXLinear_NPU layers: 2\n",
        "mxfp8 MoE training enabled\n",
        "[MXFP8/HiF8 GMM] Replaced 4 NPU GMM methods/functions\n",
        "Kept in high precision: every MoE router, decoder.layers.0.self_attention.linear_proj, "
        "decoder.layers.0.self_attention.linear_qkv, output_layer\n",
    ):
        assert run.output.count(line) == 1, line


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--hidden-size 72 --ffn-hidden-size 100 --seq-length 21", id="tail-blocks"),
        pytest.param("--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear", id="sequential"),
        pytest.param(
            "--num-experts 4 --moe-grouped-gemm --disable-bias-linear --swiglu", id="swiglu-experts"
        ),
        pytest.param(
            "--num-experts 4 --moe-grouped-gemm --no-bias-dropout-fusion --no-bias-gelu-fusion",
            id="experts-with-biases",
        ),
        pytest.param("--no-gradient-accumulation-fusion", id="unfused-gradients"),
        pytest.param("--use-distributed-optimizer", id="distributed-optimizer"),
        pytest.param("--recompute-activations", id="selective-recompute"),
        pytest.param(
            "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
            "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights",
            id="llama-like",
        ),
        pytest.param(
            "--recompute-granularity selective --recompute-modules layernorm mlp --disable-bias-linear",
            id="selective-modules",
        ),
    ],
)
def test_trains(tmp_path, flags):
    [run] = succeeded(train(tmp_path, [*MXFP8, *DEFER, "--train-iters", "12", *flags.split()]))
    assert len(run.losses) == 12 and run.losses[-1] < run.losses[0] - 0.05


def test_fp16_trains(tmp_path):
    flags = "--initial-loss-scale 1024 --train-iters 12".split()
    [run] = succeeded(train(tmp_path, [*MXFP8, *flags], precision="--fp16"))
    assert len(run.losses) == 12 and run.losses[-1] < run.losses[0] - 0.05


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--lowp-filter-fqns self_atention",
            "error: --lowp-filter-fqns: 'self_atention' is in no layer's name; the nearest: self_attention",
        ),
        (
            "--lowp-filter-fqns decoder",
            "error: --lowp-filter-fqns: no layer of the model was converted: all are kept in high precision",
        ),
        (
            "--num-experts 4 --lowp-moe-fqns expertz",
            "error: --lowp-moe-fqns: 'expertz' is in no expert's name; the nearest: experts",
        ),
    ],
)
def test_mistakes_stop_with_a_message(tmp_path, flags, message):
    [run] = train(tmp_path, [*MXFP8, *flags.split(), "--train-iters", "1"])
    assert run.exit_code == 1 and message in run.output and "Traceback" not in run.output


def test_filters_number_layers_through_all_pipeline_stages(tmp_path):
    flags = "--pipeline-model-parallel-size 2 --num-layers 4 --train-iters 1 --global-batch-size 4".split()
    filters = ["--lowp-filter-fqns", "decoder.layers.1.mlp", "--lowp-filter-fqns", "decoder.layers.3."]
    first, _ = succeeded(train(tmp_path, [*MXFP8, *flags, *filters], ranks=2))
    assert "Swapped to MXLinear_NPU layers: 6\n" in first.output  # of the eight in layers 0 and 1
    assert "decoder.layers.1.mlp.linear_fc1, decoder.layers.1.mlp.linear_fc2\n" in first.output


def test_a_filter_that_matches_on_no_rank_stops_every_rank(tmp_path):
    flags = "--lowp-filter-fqns nowhere --tensor-model-parallel-size 2 --train-iters 1".split()
    for run in train(tmp_path, [*MXFP8, *flags], ranks=2):
        assert run.exit_code == 1
        assert "error: --lowp-filter-fqns: 'nowhere' is in no layer's name" in run.output
