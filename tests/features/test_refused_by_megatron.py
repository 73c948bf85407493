"""Combinations that Megatron refuses, late or in words that do not help: what a user of ours reads."""

import pytest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--async-save --ckpt-format torch --save c --save-interval 1",
            "--async-save cannot be used with --ckpt-format torch: set --ckpt-format torch_dist",
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
            "the rest of backward: leave it out",
        ),
        (
            "--delay-wgrad-compute --transformer-impl transformer_engine",
            "--delay-wgrad-compute needs the kernels of Transformer Engine, which is not installed: leave "
            "it out (the modules of --transformer-impl transformer_engine are here, without them)",
        ),
    ],
)
@pytest.mark.parametrize("precision", ["--bf16", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8"])
def test_refusals_say_what_to_change(stops, precision, flags, message):
    assert stops(f"{precision} {flags}") == f"error: {message}"
