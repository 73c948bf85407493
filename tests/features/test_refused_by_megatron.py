"""Combinations that Megatron refuses, late or in words that do not help: what a user of ours reads."""

import pytest

DELAY = "--delay-wgrad-compute --overlap-moe-expert-parallel-comm --transformer-impl transformer_engine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--async-save --ckpt-format torch --save c --save-interval 1",
            "--async-save cannot be used with --ckpt-format torch: set --ckpt-format torch_dist",
        ),
        (
            "--recompute-granularity selective --recompute-modules layernorm mlp",
            "--recompute-modules mlp: Megatron's backward never ends where MLPs have biases: add "
            "--disable-bias-linear, or leave mlp out",
        ),
        (
            "--recompute-modules layernorm moe_act",
            "--recompute-modules layernorm moe_act has no effect without --recompute-granularity selective: "
            "add it, or leave --recompute-modules out",
        ),
        (
            "--context-parallel-size 2",
            "--context-parallel-size 2: the attention of --transformer-impl local does not divide a "
            "sequence: leave it out; --sequence-parallel with --tensor-model-parallel-size divides "
            "activations",
        ),
        (
            "--context-parallel-size 2 --transformer-impl transformer_engine",
            "--context-parallel-size 2 needs the kernels of Transformer Engine, which is not "
            "installed: leave it out (the modules of --transformer-impl transformer_engine are here, without "
            "them)",
        ),
        (
            "--delay-wgrad-compute",
            "--delay-wgrad-compute: the modules of --transformer-impl local compute weight gradients with "
            "the rest of backward: set --transformer-impl transformer_engine, or leave it out",
        ),
        (
            "--delay-wgrad-compute --transformer-impl transformer_engine",
            "--delay-wgrad-compute needs --overlap-moe-expert-parallel-comm: add it, or leave "
            "--delay-wgrad-compute out",
        ),
        (
            f"{DELAY} --overlap-grad-reduce",
            "--delay-wgrad-compute cannot be used with --overlap-grad-reduce: leave one of the two out",
        ),
        (
            f"{DELAY} --no-gradient-accumulation-fusion",
            "--delay-wgrad-compute cannot be used with --no-gradient-accumulation-fusion: leave one of the "
            "two out",
        ),
    ],
)
def test_refusals_say_what_to_change(stops, flags, message):
    assert stops(f"--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 {flags}") == f"error: {message}"
    if "--overlap-moe-expert-parallel-comm" not in flags:
        assert stops(f"--bf16 {flags}") == f"error: {message}"


def test_there_is_nothing_to_delay_without_a_recipe(stops):
    assert stops(f"--bf16 {DELAY}") == (
        "error: --delay-wgrad-compute: without Transformer Engine only a recipe's weight gradients can be "
        "delayed: add --fp8-format e4m3 --fp8-recipe mxfp8, or leave --delay-wgrad-compute out"
    )
