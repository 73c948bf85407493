"""What is not supported is refused with a ValueError that names the argument."""

import pytest
import torch

from mindspeed_lowp import ops
from tests.ops.data import normal

E4M3 = torch.float8_e4m3fn
X = normal((64, 96))
GROUPS = torch.tensor([10, 64])
CODES, MXSCALE = ops.dynamic_mx_quant(X, dst_type=E4M3)


def call(function, good, **changed):
    """``function`` with arguments of a call that works, some of them changed."""
    arguments = good | changed
    positional = [arguments.pop(name) for name in ("self", "x", "x1", "x2", "weight") if name in arguments]
    return function(*positional, **arguments)


QUANT = {"x": X, "dst_type": E4M3}
GROUPED = {"x": X, "group_index": GROUPS, "dst_type": E4M3}
ANTI = {"x": CODES, "mxscale": MXSCALE}


@pytest.mark.parametrize(
    ("function", "good"),
    [
        (ops.dynamic_mx_quant, QUANT),
        (ops.dynamic_mx_quant_with_dual_axis, QUANT),
        (ops.grouped_dynamic_mx_quant, GROUPED),
        (ops.anti_mx_quant, ANTI),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_calls_that_the_other_tests_break_do_work(function, good):
    call(function, good)


@pytest.mark.parametrize(
    ("function", "good", "changed", "message"),
    [
        (ops.dynamic_mx_quant, QUANT, {"dst_type": torch.int8}, "dst_type=torch.int8"),
        (ops.dynamic_mx_quant, QUANT, {"round_mode": "floor"}, "round_mode='floor'.*'rint'"),
        (ops.dynamic_mx_quant, QUANT, {"block_size": 48}, "block_size=48.*32"),
        (ops.dynamic_mx_quant, QUANT, {"scale_alg": 2}, "scale_alg=2.*0 or 1"),
        (ops.dynamic_mx_quant, QUANT, {"axis": 2}, "axis=2.*-2 to 1"),
        (ops.dynamic_mx_quant, QUANT, {"x": X.double()}, "x has dtype torch.float64"),
        (ops.dynamic_mx_quant, QUANT, {"x": torch.tensor(1.0)}, "x has 0 dimensions"),
        (ops.dynamic_mx_quant, QUANT, {"x": X[:, :31].float()}, "only 31 elements along axis 1"),
        (ops.dynamic_mx_quant_with_dual_axis, QUANT, {"x": X.float()}, "x has dtype torch.float32"),
        (ops.dynamic_mx_quant_with_dual_axis, QUANT, {"x": X[0]}, "x has 1 dimensions"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"x": X.float()}, "x has dtype torch.float32"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"blocksize": 16}, "blocksize=16"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"group_index": GROUPS.float()}, "group_index has dtype"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"group_index": GROUPS[:0]}, "group_index is empty"),
        (ops.anti_mx_quant, ANTI, {"x": X}, "x has dtype torch.bfloat16"),
        (
            ops.anti_mx_quant,
            ANTI,
            {"mxscale": MXSCALE[1:]},
            r"mxscale has shape \[63, 2, 2\], expected \[64, 2, 2\]",
        ),
        (ops.anti_mx_quant, ANTI, {"dst_type": torch.int8}, "dst_type=torch.int8"),
    ],
)
def test_error_names_the_argument(function, good, changed, message):
    with pytest.raises(ValueError, match=message):
        call(function, good, **changed)
