"""Which mixtures of experts get grouped linears, and what a model is told of FP8."""

import pytest
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.training import arguments

from mindspeed_lowp.megatron.grouped_linear import TEColumnParallelGroupedLinear

MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"


@pytest.mark.parametrize(
    ("flags", "experts"),
    [
        ("--num-experts 4", SequentialMLP),
        (f"--num-experts 4 {MXFP8}", SequentialMLP),
        ("--num-experts 4 --moe-grouped-gemm --disable-bias-linear", TEGroupedMLP),
        (f"--num-experts 4 --moe-grouped-gemm --disable-bias-linear {MXFP8}", TEGroupedMLP),
    ],
)
def test_experts_are_grouped_where_the_flag_says_so(parse, flags, experts):
    args = parse(f"--bf16 {flags}")
    built = LocalSpecProvider().grouped_mlp_modules(args.moe_grouped_gemm)
    assert built.func is experts
    if experts is TEGroupedMLP:
        assert built.keywords["submodules"].linear_fc1 is TEColumnParallelGroupedLinear


@pytest.mark.parametrize(
    "experts", ["", "--num-experts 4", "--num-experts 4 --moe-grouped-gemm --disable-bias-linear"]
)
def test_the_model_is_built_from_a_config_without_fp8(parse, experts):
    """Megatron refuses experts with FP8, and recomputation, where Transformer Engine is absent."""
    args = parse(
        f"--bf16 {MXFP8} {experts} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    )
    config = arguments.core_transformer_config_from_args(args)
    assert config.fp8 is None and args.fp8 == "e4m3"


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("", "add --disable-bias-linear, or --no-bias-dropout-fusion --no-bias-gelu-fusion"),
        ("--swiglu", "add --disable-bias-linear, or --no-bias-dropout-fusion"),
        ("--no-bias-dropout-fusion", "add --disable-bias-linear, or --no-bias-gelu-fusion"),
    ],
)
def test_fused_biases_of_grouped_experts_stop(stops, flags, remedy):
    message = stops(f"--bf16 --num-experts 4 --moe-grouped-gemm {flags}")
    assert "--moe-grouped-gemm" in message and message.endswith(remedy)
