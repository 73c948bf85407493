"""What is not supported is refused with a ValueError that names the argument."""

import pytest
import torch

from mindspeed_lowp import ops
from tests.ops.data import normal

E4M3 = torch.float8_e4m3fn
X = normal((64, 96))
GROUPS = torch.tensor([10, 64])
CODES, MXSCALE = ops.dynamic_mx_quant(X, dst_type=E4M3)
CODES2, MXSCALE2 = ops.dynamic_mx_quant(normal((96, 40)), axis=-2, dst_type=E4M3)
A, A_SCALE = ops.grouped_dynamic_mx_quant(X, GROUPS, dst_type=E4M3)
B, B_SCALE = ops.grouped_dynamic_mx_quant(normal((64, 40)), GROUPS, dst_type=E4M3)
WEIGHT, WEIGHT_SCALE = ops.dynamic_mx_quant(normal((2, 96, 40)), axis=-2, dst_type=E4M3)


def call(function, good, **changed):
    """``function`` with arguments of a call that works, some of them changed."""
    arguments = good | changed
    positional = [arguments.pop(name) for name in ("self", "x", "x1", "x2", "weight") if name in arguments]
    return function(*positional, **arguments)


QUANT = {"x": X, "dst_type": E4M3}
GROUPED = {"x": X, "group_index": GROUPS, "dst_type": E4M3}
ANTI = {"x": CODES, "mxscale": MXSCALE}
MATMUL = {
    "x1": CODES,
    "x2": CODES2,
    "scale": MXSCALE2,
    "pertoken_scale": MXSCALE,
    "output_dtype": torch.bfloat16,
}
GMM = {
    "x": [CODES],
    "weight": [WEIGHT],
    "scale": [WEIGHT_SCALE],
    "per_token_scale": [MXSCALE],
    "group_list": GROUPS,
    "group_type": 0,
    "split_item": 3,
    "output_dtype": torch.bfloat16,
}
GMM_K = GMM | {
    "x": [A.t()],
    "weight": [B],
    "scale": [B_SCALE],
    "per_token_scale": [A_SCALE.transpose(0, 1)],
    "group_type": 2,
}
ADD = {"self": torch.zeros(64, 40), "x1": CODES, "x2": CODES2, "x2_scale": MXSCALE2, "x1_scale": MXSCALE}
ADD_GMM = {
    "self": torch.zeros(2, 96, 40),
    "x1": A.t(),
    "x2": B,
    "x2_scale": B_SCALE,
    "group_list": GROUPS,
    "x1_scale": A_SCALE.transpose(0, 1),
}


@pytest.mark.parametrize(
    ("function", "good"),
    [
        (ops.dynamic_mx_quant, QUANT),
        (ops.dynamic_mx_quant_with_dual_axis, QUANT),
        (ops.grouped_dynamic_mx_quant, GROUPED),
        (ops.anti_mx_quant, ANTI),
        (ops.quant_matmul, MATMUL),
        (ops.grouped_matmul, GMM),
        (ops.grouped_matmul, GMM_K),
        (ops.add_quant_matmul_, ADD),
        (ops.add_quant_gmm_, ADD_GMM),
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
        (ops.quant_matmul, MATMUL, {"output_dtype": None}, "output_dtype=None"),
        (ops.quant_matmul, MATMUL, {"pertoken_scale": None}, "pertoken_scale=None"),
        (ops.quant_matmul, MATMUL, {"x1": X}, "x1 has dtype torch.bfloat16"),
        (ops.quant_matmul, MATMUL, {"x2": CODES2[1:]}, "x2 has 95 rows"),
        (ops.quant_matmul, MATMUL, {"scale": MXSCALE2[1:]}, "scale has shape"),
        (
            ops.quant_matmul,
            MATMUL,
            {"pertoken_scale": MXSCALE.float()},
            "pertoken_scale has dtype torch.float32",
        ),
        (ops.quant_matmul, MATMUL, {"scale_dtype": torch.float32}, "scale_dtype=torch.float32"),
        (ops.quant_matmul, MATMUL, {"x1_dtype": 290}, "x1_dtype=290"),
        (ops.quant_matmul, MATMUL, {"offset": torch.zeros(1)}, "offset"),
        (ops.quant_matmul, MATMUL, {"group_sizes": [1, 128, 128]}, r"group_sizes=\[1, 128, 128\]"),
        (ops.quant_matmul, MATMUL, {"bias": torch.zeros(40).bfloat16()}, "bias has dtype torch.bfloat16"),
        (ops.quant_matmul, MATMUL, {"bias": torch.zeros(39)}, "bias has shape"),
        (ops.grouped_matmul, GMM, {"bias": [torch.zeros(40)]}, "bias"),
        (ops.grouped_matmul, GMM, {"split_item": 0}, "split_item=0.*2 or 3"),
        (ops.grouped_matmul, GMM, {"group_type": -1}, "group_type=-1"),
        (ops.grouped_matmul, GMM, {"group_list_type": 2}, "group_list_type=2"),
        (ops.grouped_matmul, GMM, {"group_list": None}, "group_list=None"),
        (ops.grouped_matmul, GMM, {"group_list": torch.tensor([64])}, "group_list has shape"),
        (ops.grouped_matmul, GMM, {"group_list": torch.tensor([10, 65])}, "covers 65 rows"),
        (
            ops.grouped_matmul,
            GMM,
            {"group_list": torch.tensor([-1, 5]), "group_list_type": 1},
            "not be negative",
        ),
        (ops.grouped_matmul, GMM, {"x": CODES}, "x must be a list of exactly one tensor, got a tensor"),
        (
            ops.grouped_matmul,
            GMM,
            {"weight": [WEIGHT, WEIGHT]},
            "weight must be a list of exactly one tensor, got 2",
        ),
        (ops.grouped_matmul, GMM, {"scale": None}, "scale must be a list of exactly one tensor, got None"),
        (ops.grouped_matmul, GMM_K, {"weight": [WEIGHT]}, "weight has 3 dimensions"),
        (ops.grouped_matmul, GMM_K, {"per_token_scale": [A_SCALE]}, "per_token_scale has shape"),
        (
            ops.add_quant_matmul_,
            ADD,
            {"self": torch.zeros(64, 40).bfloat16()},
            "self has dtype torch.bfloat16",
        ),
        (ops.add_quant_matmul_, ADD, {"self": torch.zeros(64, 41)}, "self has shape"),
        (ops.add_quant_matmul_, ADD, {"x1_scale": None}, "x1_scale=None"),
        (ops.add_quant_gmm_, ADD_GMM, {"self": torch.zeros(3, 96, 40)}, "self has shape"),
        (ops.add_quant_gmm_, ADD_GMM, {"x2_dtype": 290}, "x2_dtype=290"),
    ],
)
def test_error_names_the_argument(function, good, changed, message):
    with pytest.raises(ValueError, match=message):
        call(function, good, **changed)
