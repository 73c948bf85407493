"""What the matmul operators do not support is refused with a ValueError that names the argument."""

import pytest
import torch

from mindspeed_lowp import ops
from tests.ops.data import normal
from tests.ops.test_arguments import call

E4M3 = torch.float8_e4m3fn
GROUPS = torch.tensor([10, 64])
BF16 = {"output_dtype": torch.bfloat16}


def mx(shape: tuple[int, ...], axis: int, dst_type: torch.dtype | int = E4M3):
    return ops.dynamic_mx_quant(normal(shape), axis=axis, dst_type=dst_type)


CODES, MXSCALE = mx((64, 96), -1)
CODES2, MXSCALE2 = mx((96, 40), -2)
MATMUL = {"x1": CODES, "x2": CODES2, "scale": MXSCALE2, "pertoken_scale": MXSCALE, **BF16}
MATMUL |= {"scale_dtype": 293, "pertoken_scale_dtype": 293, "group_sizes": [1, 1, 32]}

FP4, FP4_SCALE = mx((64, 96), -1, 296)
FP4_2, FP4_SCALE2 = mx((96, 40), -2, 296)
MATMUL_FP4 = MATMUL | {"x1": FP4, "x2": FP4_2, "scale": FP4_SCALE2, "pertoken_scale": FP4_SCALE}
MATMUL_FP4 |= {"x1_dtype": 296, "x2_dtype": 296}

VECTORS = {"x1": CODES, "x2": CODES2, "scale": torch.ones(40), "pertoken_scale": torch.ones(64), **BF16}
HIF8 = VECTORS | {"x1": CODES.view(torch.uint8), "x2": CODES2.view(torch.uint8)}
HIF8 |= {"x1_dtype": 290, "x2_dtype": 290}
INT8 = VECTORS | {"x1": torch.zeros(64, 96, dtype=torch.int8), "x2": torch.zeros(96, 40, dtype=torch.int8)}
BLOCKS = VECTORS | {"scale": torch.ones(1, 1), "pertoken_scale": torch.ones(64, 1)}
BLOCKS |= {"group_sizes": [1, 128, 128]}
INT8_BLOCKS = INT8 | {k: BLOCKS[k] for k in ("scale", "pertoken_scale", "group_sizes")}

A, A_SCALE = ops.grouped_dynamic_mx_quant(normal((64, 96)), GROUPS, dst_type=E4M3)
B, B_SCALE = ops.grouped_dynamic_mx_quant(normal((64, 40)), GROUPS, dst_type=E4M3)
WEIGHT, WEIGHT_SCALE = mx((2, 96, 40), -2)
GMM = {"x": [CODES], "weight": [WEIGHT], "scale": [WEIGHT_SCALE], "per_token_scale": [MXSCALE], **BF16}
GMM |= {"group_list": GROUPS, "group_type": 0, "split_item": 3}
GMM_K = GMM | {"x": [A.t()], "weight": [B], "scale": [B_SCALE], "group_type": 2}
GMM_K |= {"per_token_scale": [A_SCALE.transpose(0, 1)]}
GMM_VECTORS = GMM | {"scale": [torch.ones(2, 40)], "per_token_scale": [torch.ones(64)]}
GMM_K_VECTORS = GMM_K | {"scale": [torch.ones(2, 40)], "per_token_scale": [torch.ones(2, 96)]}
GMM_BLOCKS = GMM | {"scale": [torch.ones(2, 1, 1)], "per_token_scale": [torch.ones(64, 1)]}
GMM_K_BLOCKS = GMM_K | {"scale": [torch.ones(2, 1)], "per_token_scale": [torch.ones(96, 2)]}
WEIGHT_FP4, WEIGHT_FP4_SCALE = mx((2, 96, 40), -2, 296)
GMM_FP4 = GMM | {"x": [FP4], "weight": [WEIGHT_FP4], "x_dtype": 296, "weight_dtype": 296}
GMM_FP4 |= {"scale": [WEIGHT_FP4_SCALE], "per_token_scale": [FP4_SCALE], "bias": [torch.zeros(2, 40)]}

ADD = {"self": torch.zeros(64, 40), "x1": CODES, "x2": CODES2, "x2_scale": MXSCALE2, "x1_scale": MXSCALE}
ADD_HIF8 = ADD | {key: HIF8[key] for key in ("x1", "x2", "x1_dtype", "x2_dtype")}
ADD_HIF8 |= {"x1_scale": torch.ones(1), "x2_scale": torch.ones(1)}
ADD_GMM = {"self": torch.zeros(2, 96, 40), "x1": A.t(), "x2": B, "group_list": GROUPS}
ADD_GMM |= {"x2_scale": B_SCALE, "x1_scale": A_SCALE.transpose(0, 1)}
ADD_GMM_HIF8 = ADD_GMM | {"x1": A.t().view(torch.uint8), "x2": B.view(torch.uint8)}
ADD_GMM_HIF8 |= {"x1_dtype": 290, "x2_dtype": 290, "x1_scale": torch.ones(2), "x2_scale": torch.ones(2, 40)}

CALLS = {
    ops.quant_matmul: (MATMUL, MATMUL_FP4, VECTORS, HIF8, INT8, BLOCKS, INT8_BLOCKS),
    ops.grouped_matmul: (
        GMM,
        GMM_K,
        GMM_VECTORS,
        GMM_K_VECTORS,
        GMM_BLOCKS,
        GMM_K_BLOCKS,
        GMM_FP4,
    ),
    ops.add_quant_matmul_: (ADD, ADD_HIF8),
    ops.add_quant_gmm_: (ADD_GMM, ADD_GMM_HIF8),
}


@pytest.mark.parametrize(
    ("function", "good"),
    [(function, good) for function, calls in CALLS.items() for good in calls],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_calls_that_the_other_tests_break_do_work(function, good):
    call(function, good)


@pytest.mark.parametrize(
    ("good", "changed", "message"),
    [
        (MATMUL, {"output_dtype": None}, "output_dtype=None"),
        (MATMUL, {"output_dtype": torch.int8}, "output_dtype=torch.int8"),
        (MATMUL, {"pertoken_scale": None}, "pertoken_scale=None"),
        (MATMUL, {"x1": normal((64, 96))}, "x1 has dtype torch.bfloat16"),
        (MATMUL, {"x1": CODES.view(torch.uint8)}, r"x1 has dtype torch.uint8; .*x1_dtype=290 .* or 296"),
        (MATMUL, {"x1": CODES[0]}, "x1 has 1 dimensions; 2 to 6"),
        (MATMUL, {"x2": CODES2[1:]}, "x2 has 95 rows"),
        (MATMUL, {"scale": MXSCALE2[1:]}, r"scale has shape \[1, 40, 2\], expected \[2, 40, 2\]"),
        (MATMUL, {"scale": MXSCALE2[0]}, "scale has 2 dimensions; .* 3"),
        (MATMUL, {"pertoken_scale": MXSCALE.float()}, "pertoken_scale has dtype torch.float32"),
        (MATMUL, {"scale_dtype": torch.float32}, "scale_dtype=torch.float32"),
        (MATMUL, {"scale_dtype": None}, "scale_dtype=None .* 293"),
        (MATMUL, {"pertoken_scale_dtype": None}, "pertoken_scale_dtype=None .* 293"),
        (MATMUL, {"x1_dtype": 290}, "x1 has dtype torch.float8_e4m3fn, but x1_dtype=290"),
        (MATMUL, {"x1_dtype": 292}, "x1_dtype=292 is not supported; use hif8 .* or e2m1"),
        (MATMUL, {"x2": FP4_2, "x2_dtype": 296}, "x1 is e4m3 and x2 is e2m1; with MX scales"),
        (MATMUL, {"x2": CODES2.view(torch.uint8), "x2_dtype": 290}, "x1 is e4m3 and x2 is hif8"),
        (MATMUL, {"offset": torch.zeros(1)}, "offset"),
        (MATMUL, {"group_sizes": [1, 1, 64]}, r"group_sizes=\[1, 1, 64\].*\[1, 1, 32\]"),
        (MATMUL, {"group_sizes": None}, r"group_sizes=None is .* torch.uint8; with MX .* \[1, 1, 32\]"),
        (MATMUL, {"bias": torch.zeros(40).bfloat16()}, "bias has dtype torch.bfloat16"),
        (MATMUL, {"bias": torch.zeros(39)}, "bias has shape"),
        (MATMUL, {"bias": torch.zeros(1, 1, 40)}, "bias has 3 dimensions and the result 2"),
        (MATMUL_FP4, {"x2_dtype": 297}, "x2_dtype=297"),
        (MATMUL_FP4, {"x1": FP4[:31]}, r"x1 has shape \[31, 48\] .* axis -2 of x1 must be 64 or half"),
        (MATMUL_FP4, {"x2": FP4_2[:, :9]}, r"x2 has shape \[96, 9\] .* axis -1 of x2 must be 40 or half"),
        (MATMUL_FP4, {"x2": FP4_2[:95]}, "x2 has 95 rows, x1 has 96 columns"),
        (MATMUL_FP4, {"x1": FP4[:, :1], "pertoken_scale": FP4_SCALE[:, :1]}, "x1 has K=2; FP4 needs"),
        (VECTORS, {"pertoken_scale": None}, "pertoken_scale=None"),
        (VECTORS, {"pertoken_scale": torch.ones(63)}, r"pertoken_scale has shape \[63\], .*\[1\] or \[64\]"),
        (VECTORS, {"scale": torch.ones(40, 1)}, r"scale has shape \[40, 1\], expected \[1\] or \[40\]"),
        (VECTORS, {"scale": torch.ones(40).bfloat16()}, "scale has dtype torch.bfloat16"),
        (VECTORS, {"scale": torch.zeros(1, dtype=torch.int64)}, "scale has dtype torch.int64"),
        (VECTORS, {"scale_dtype": 293}, "scale_dtype=293 is not supported with per-tensor"),
        (VECTORS, {"x2": CODES2[1:]}, "x2 has 95 rows"),
        (HIF8, {"x2_dtype": None}, "x2 has dtype torch.uint8"),
        (HIF8, {"x2_dtype": 296}, "x1 is hif8 and x2 is e2m1; .* e4m3 and e5m2 or of hif8 or of int8"),
        (INT8, {"output_dtype": torch.float32}, "output_dtype=torch.float32 .* int8 operands"),
        (INT8, {"pertoken_scale": torch.ones(1)}, r"pertoken_scale has shape \[1\], expected \[64\]"),
        (INT8, {"x2": CODES2}, "x1 is int8 and x2 is e4m3"),
        (BLOCKS, {"bias": torch.zeros(40)}, "bias is not supported with 1x128 block scales of e4m3"),
        (BLOCKS, {"scale": torch.ones(2, 1)}, r"scale has shape \[2, 1\], expected \[1, 1\]"),
        (BLOCKS, {"pertoken_scale": torch.ones(64)}, r"pertoken_scale has shape \[64\], expected \[64, 1\]"),
        (BLOCKS, {"group_sizes": [128, 128, 128]}, r"pertoken_scale has shape \[64, 1\], expected \[1, 1\]"),
        (BLOCKS, {"group_sizes": [0, 128, 128]}, r"group_sizes=\[0, 128, 128\]"),
        (INT8_BLOCKS, {"output_dtype": torch.float16}, "output_dtype=torch.float16 .* use torch.bfloat16"),
        (INT8_BLOCKS, {"group_sizes": [128, 128, 128]}, "x1 is int8 .* 128x128 block"),
    ],
)
def test_quant_matmul(good, changed, message):
    with pytest.raises(ValueError, match=message):
        call(ops.quant_matmul, good, **changed)


def test_leading_dimensions_must_broadcast():
    a, b = torch.zeros(2, 4, 8).to(E4M3), torch.zeros(3, 8, 5).to(E4M3)
    with pytest.raises(ValueError, match=r"x2 has leading dimensions \[3\].* x1, \[2\]"):
        ops.quant_matmul(a, b, torch.ones(1), pertoken_scale=torch.ones(1), **BF16)


@pytest.mark.parametrize(
    ("good", "changed", "message"),
    [
        (GMM, {"bias": [torch.zeros(2, 40)]}, "bias is not supported with e4m3"),
        (GMM, {"split_item": 0}, "split_item=0.*2 or 3"),
        (GMM, {"group_type": -1}, "group_type=-1"),
        (GMM, {"group_list_type": 2}, "group_list_type=2"),
        (GMM, {"group_list": None}, "group_list=None"),
        (GMM, {"group_list": torch.tensor([64])}, "group_list has shape"),
        (GMM, {"group_list": torch.tensor([10, 65])}, "covers 65 rows"),
        (GMM, {"group_list": torch.tensor([-1, 5]), "group_list_type": 1}, "not be negative"),
        (GMM, {"x": CODES}, "x must be a list of exactly one tensor, got a tensor"),
        (GMM, {"weight": [WEIGHT, WEIGHT]}, "weight must be a list of exactly one tensor, got 2"),
        (GMM, {"weight": [WEIGHT[:, 1:]]}, "weight has 95 rows, x has 96 columns"),
        (GMM, {"scale": None}, "scale must be a list of exactly one tensor, got None"),
        (GMM, {"scale": [WEIGHT_SCALE[:1]]}, "scale has shape"),
        (GMM, {"output_dtype": None}, "output_dtype=None"),
        (GMM, {"x_dtype": 290}, "x has dtype torch.float8_e4m3fn, but x_dtype=290"),
        (GMM, {"weight_dtype": 297}, "weight_dtype=297"),
        (GMM_K, {"weight": [WEIGHT]}, "weight has 3 dimensions"),
        (GMM_K, {"per_token_scale": [A_SCALE]}, "per_token_scale has shape"),
        (GMM_K, {"x": [A.t()[:, 1:]]}, "weight has 64 rows, x has 63 columns"),
        (GMM_VECTORS, {"per_token_scale": [torch.ones(63)]}, r"per_token_scale .*\[2\], \[2, 1\] or \[64\]"),
        (GMM_VECTORS, {"scale": [torch.ones(40)]}, r"scale .*expected \[2\], \[2, 1\] or \[2, 40\]"),
        (GMM_VECTORS, {"scale": [torch.ones(2, 40).double()]}, "scale has dtype torch.float64"),
        (GMM_VECTORS, {"per_token_scale": [MXSCALE]}, "per_token_scale has dtype torch.uint8"),
        (GMM_VECTORS, {"x": [FP4], "x_dtype": 296}, "x is e2m1 and weight is e4m3"),
        (GMM_VECTORS, {"x": [CODES.view(torch.int8)]}, "x is int8"),
        (GMM_K_VECTORS, {"per_token_scale": [torch.ones(96, 2)]}, r"per_token_scale .* or \[2, 96\]"),
        (GMM_BLOCKS, {"scale": [torch.ones(2, 2, 1)]}, r"scale has shape \[2, 2, 1\], expected \[2, 1, 1\]"),
        (GMM_BLOCKS, {"per_token_scale": [torch.ones(64, 2)]}, "per_token_scale has shape"),
        (GMM_K_BLOCKS, {"per_token_scale": [torch.ones(96, 3)]}, "per_token_scale has shape"),
        (GMM_FP4, {"bias": [torch.zeros(40)]}, r"bias has shape \[40\], expected \[2, 40\]"),
        (GMM_FP4, {"bias": [torch.zeros(2, 40).half()]}, "bias has dtype torch.float16"),
        (GMM_FP4, {"bias": torch.zeros(2, 40)}, "bias must be a list"),
        (GMM_FP4, {"group_type": 2, "weight": [FP4_2]}, "x is e2m1 and weight is e2m1"),
    ],
)
def test_grouped_matmul(good, changed, message):
    with pytest.raises(ValueError, match=message):
        call(ops.grouped_matmul, good, **changed)


@pytest.mark.parametrize(
    ("good", "changed", "message"),
    [
        (ADD, {"self": torch.zeros(64, 40).bfloat16()}, "self has dtype torch.bfloat16"),
        (ADD, {"self": torch.zeros(64, 41)}, "self has shape"),
        (ADD, {"x1_scale": None}, "x1_scale=None"),
        (ADD, {"group_sizes": [1, 128, 128]}, r"group_sizes=\[1, 128, 128\]"),
        (ADD, {"x1_scale": torch.ones(1), "x2_scale": torch.ones(1)}, "x1_scale has dtype torch.float32"),
        (ADD, {"x1": FP4, "x1_dtype": 296}, "x1 is e2m1 and x2 is e4m3"),
        (ADD, {"x1": CODES.view(torch.int8)}, "x1 is int8"),
        (ADD_HIF8, {"x1_scale": torch.ones(64)}, r"x1_scale has shape \[64\], expected \[1\]"),
        (ADD_HIF8, {"x2_scale": torch.ones(40)}, r"x2_scale has shape \[40\], expected \[1\]"),
        (ADD_HIF8, {"group_sizes": [1, 1, 32]}, "x1 is hif8 .* MX"),
        (ADD_HIF8, {"x2_scale_dtype": 293}, "x2_scale_dtype=293"),
    ],
)
def test_add_quant_matmul(good, changed, message):
    with pytest.raises(ValueError, match=message):
        call(ops.add_quant_matmul_, good, **changed)


@pytest.mark.parametrize(
    ("good", "changed", "message"),
    [
        (ADD_GMM, {"self": torch.zeros(3, 96, 40)}, "self has shape"),
        (ADD_GMM, {"x2_dtype": 290}, "x2_dtype=290"),
        (ADD_GMM, {"group_sizes": [1, 1, 32]}, r"group_sizes=\[1, 1, 32\]"),
        (ADD_GMM, {"group_list": torch.tensor([10, 65])}, "covers 65 rows"),
        (ADD_GMM_HIF8, {"x1_scale": torch.ones(2, 96)}, "x1_scale has shape"),
        (ADD_GMM_HIF8, {"x1_scale": torch.ones(1)}, "x1_scale has shape"),
        (ADD_GMM_HIF8, {"x2_scale": torch.ones(40)}, "x2_scale has shape"),
        (ADD_GMM_HIF8, {"x2_scale": B_SCALE}, "x2_scale has dtype torch.uint8"),
    ],
)
def test_add_quant_gmm(good, changed, message):
    with pytest.raises(ValueError, match=message):
        call(ops.add_quant_gmm_, good, **changed)
