"""What is said of the precision of a checkpoint, by its arguments."""

from argparse import Namespace

import pytest

from mindspeed_lowp.features.checkpoint_precision import precision


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"bf16": True}, "bf16"),
        ({"fp16": True, "bf16": False}, "fp16"),
        ({"bf16": False, "fp16": False}, "fp32"),
        # By Transformer Engine: Megatron's arguments, and none of this project's.
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"}, "delayed (hybrid)"),
        ({"bf16": True, "fp4": "e2m1"}, "fp4"),
        # By this project, whose file of recipes need not be there any more.
        (
            {
                "bf16": True,
                "fp8": "e4m3",
                "fp8_recipe": "mxfp8",
                "lowp_config": "gone.toml",
                "lowp_precision": "mxfp8 and hif8 (e4m3)",
            },
            "mxfp8 and hif8 (e4m3)",
        ),
    ],
)
def test_precision_of_a_checkpoint(saved, expected):
    assert precision(Namespace(**saved)) == expected
