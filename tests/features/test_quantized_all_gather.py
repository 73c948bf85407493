"""--lowp-quantized-all-gather: the refusals; and in the trainer the same bits."""

import pytest
import torch

from ..trainer import MXFP8, succeeded, train

FLAG = "--lowp-quantized-all-gather"
TWO = "--tensor-model-parallel-size 2 --sequence-parallel --use-cpu-initialization".split()


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ("", "has no effect without FP8 training: add --fp8-format e4m3 --fp8-recipe mxfp8"),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8",
            "has no effect without --sequence-parallel and --tensor-model-parallel-size 2 or more: add them, "
            f"or leave {FLAG} out",
        ),
    ],
)
def test_the_flag_needs_rows_to_gather(stops, flags, remedy):
    assert stops(f"--bf16 {flags} {FLAG}") == f"error: {FLAG} {remedy}"


@pytest.mark.parametrize(
    "recipe", [MXFP8, "--fp8-format hif8 --fp8-recipe hif8".split()], ids=["mxfp8", "hif8"]
)
def test_training_is_the_same_to_the_bit(tmp_path, recipe):
    flags = [*recipe, *TWO, "--train-iters", "3"]
    plain = succeeded(train(tmp_path, flags, ranks=2))
    quantized = succeeded(train(tmp_path, [*flags, FLAG], ranks=2))
    said = "Sequence-parallel inputs are gathered quantized: 1.0"
    assert said in quantized[0].output and said not in plain[0].output
    for a, b in zip(plain, quantized, strict=True):
        assert len(a.losses) == 3 and a.losses == b.losses
        assert all(torch.equal(a.last[name], tensor) for name, tensor in b.last.items())
