"""What is not supported is refused with a ValueError that names the argument."""

import inspect

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
FP4 = {"x": X, "dst_type": 296}
GROUPED = {"x": X, "group_index": GROUPS, "dst_type": E4M3}
ANTI = {"x": CODES, "mxscale": MXSCALE}
ANTI_FP4 = dict(zip(("x", "mxscale"), ops.dynamic_mx_quant(X), strict=True)) | {"src_type": 296}


@pytest.mark.parametrize(
    ("function", "good"),
    [
        (ops.dynamic_mx_quant, QUANT),
        (ops.dynamic_mx_quant_with_dual_axis, QUANT),
        (ops.grouped_dynamic_mx_quant, GROUPED),
        (ops.dynamic_mx_quant, FP4),
        (ops.dynamic_block_mx_quant, FP4),
        (ops.anti_mx_quant, ANTI),
        (ops.anti_mx_quant, ANTI_FP4),
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
        (ops.dynamic_mx_quant, QUANT, {"block_size": 1056}, "block_size=1056.*up to 1024"),
        (ops.dynamic_mx_quant, QUANT, {"block_size": 0}, "block_size=0"),
        (ops.dynamic_mx_quant, QUANT, {"block_size": -32}, "block_size=-32"),
        (ops.dynamic_mx_quant, QUANT, {"x": X.float(), "block_size": 64}, "block_size=64.*float32"),
        (ops.dynamic_mx_quant, QUANT, {"dst_type_max": 6.0}, "dst_type_max=6.0.*scale_alg=0; use 0.0"),
        (ops.dynamic_mx_quant, QUANT, {"max_low_bound": 1.0}, "max_low_bound=1.0.*scale_alg=1"),
        (
            ops.dynamic_mx_quant,
            QUANT,
            {"scale_alg": 1, "max_low_bound": float("nan")},
            "max_low_bound=nan.*finite positive",
        ),
        (ops.dynamic_mx_quant, QUANT, {"scale_alg": 1, "max_low_bound": -1.0}, "max_low_bound=-1.0"),
        (ops.dynamic_mx_quant, QUANT, {"dst_type": 290}, "dst_type=290"),
        (ops.dynamic_mx_quant, FP4, {"x": X[:, :95]}, "x has 95 elements along its last axis.*even"),
        (ops.dynamic_mx_quant, FP4, {"x": X[:, :95], "axis": 0}, "x has 95 elements along its last axis"),
        (ops.dynamic_mx_quant, FP4, {"scale_alg": 1}, "scale_alg=1.*e2m1; use 0 or 2"),
        (
            ops.dynamic_mx_quant,
            FP4,
            {"round_mode": "ceil"},
            "round_mode='ceil'.*'rint' or 'floor' or 'round'",
        ),
        (ops.dynamic_mx_quant, FP4, {"scale_alg": 2, "block_size": 64}, "block_size=64.*scale_alg=2"),
        (ops.dynamic_mx_quant, FP4, {"scale_alg": 2, "dst_type_max": 5.5}, "dst_type_max=5.5.*6.0 to 12.0"),
        (
            ops.dynamic_mx_quant,
            FP4,
            {"scale_alg": 2, "dst_type_max": float("nan")},
            "dst_type_max=nan.*6.0 to 12.0",
        ),
        (ops.dynamic_mx_quant, FP4, {"dst_type": 297, "scale_alg": 2}, "scale_alg=2.*e1m2; use 0"),
        (ops.dynamic_mx_quant_with_dual_axis, FP4, {"dst_type": 297, "scale_alg": 2}, "scale_alg=2.*e1m2"),
        (ops.dynamic_mx_quant_with_dual_axis, FP4, {"x": X[:, 1:]}, "x has 95 elements"),
        (ops.dynamic_mx_quant_with_dual_axis, QUANT, {"round_mode": "round"}, "round_mode='round'.*'rint'"),
        (ops.dynamic_block_mx_quant, QUANT, {"scale_alg": 1}, "scale_alg=1.*e4m3; use 0"),
        (ops.dynamic_block_mx_quant, FP4, {"scale_alg": 2, "dst_type_max": 8.0}, "dst_type_max=8.0.*7.0"),
        (ops.dynamic_block_mx_quant, FP4, {"x": X.float()}, "x has dtype torch.float32"),
        (ops.dynamic_block_mx_quant, FP4, {"x": X[None, None]}, "x has 4 dimensions; 2 to 3"),
        (ops.dynamic_block_mx_quant, FP4, {"x": X[:0]}, r"x has shape \[0, 96\]; empty"),
        (ops.dynamic_block_mx_quant, FP4, {"x": X[:, 1:]}, "x has 95 elements"),
        (ops.dynamic_mx_quant_with_dual_axis, QUANT, {"x": X.float()}, "x has dtype torch.float32"),
        (ops.dynamic_mx_quant_with_dual_axis, QUANT, {"x": X[0]}, "x has 1 dimensions"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"x": X.float()}, "x has dtype torch.float32"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"blocksize": 16}, "blocksize=16"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"group_index": GROUPS.float()}, "group_index has dtype"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"group_index": GROUPS[:0]}, "group_index is empty"),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"dst_type": 296, "x": X[:, 1:]}, "x has 95 elements"),
        (
            ops.grouped_dynamic_mx_quant,
            GROUPED,
            {"dst_type": 297, "scale_alg": 2, "dst_type_max": 6.0},
            "dst_type_max=6.0.*1.75 to 3.5",
        ),
        (ops.anti_mx_quant, ANTI, {"x": X}, "x has dtype torch.bfloat16"),
        (ops.anti_mx_quant, ANTI, {"src_type": 296}, "src_type=296.*e4m3"),
        (ops.anti_mx_quant, ANTI_FP4, {"src_type": 292}, "src_type=292.*e2m1"),
        (ops.anti_mx_quant, ANTI_FP4, {"axis": 0}, r"mxscale has shape .*expected \[1, 96, 2\]"),
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


@pytest.mark.parametrize("name", sorted(ops.__all__))
def test_something_that_is_no_tensor_is_named(name):
    operator = getattr(ops, name)
    parameters = list(inspect.signature(operator).parameters.values())
    required = [p.name for p in parameters if p.default is p.empty]
    for wrong in (None, 1.5, "x"):
        with pytest.raises(ValueError, match=r"\w+=.* is not supported; (expected .*Tensor|use )"):
            operator(**dict.fromkeys(required, wrong))


@pytest.mark.parametrize(
    ("function", "good", "changed"),
    [
        (ops.dynamic_mx_quant, QUANT, {"axis": "a"}),
        (ops.dynamic_mx_quant, QUANT, {"block_size": "32"}),
        (ops.dynamic_mx_quant, QUANT, {"max_low_bound": None}),
        (ops.grouped_dynamic_mx_quant, GROUPED, {"group_index": [64]}),
        (ops.anti_mx_quant, ANTI, {"mxscale": 3}),
        (ops.dynamic_quant, {"x": X}, {"dst_type_max": None}),
        (ops.dynamic_block_quant, {"x": X}, {"min_scale": None}),
        (ops.quant_dequant_mxfp4, {"x": X}, {"inv_scale_factor_scale": None}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_something_of_another_kind_is_named(function, good, changed):
    (name,) = changed
    with pytest.raises(ValueError, match=rf"{name}="):
        call(function, good, **changed)


def test_an_accumulator_that_overlaps_itself_is_refused():
    total = torch.zeros(1, 64, 64).expand(2, 64, 64)
    y, scale = ops.grouped_dynamic_mx_quant(X[:, :64].contiguous(), torch.tensor([32, 64]), dst_type=E4M3)
    with pytest.raises(ValueError, match="self is an expanded or a negated view"):
        ops.add_quant_gmm_(total, y.t(), y, scale, torch.tensor([32, 64]), x1_scale=scale.transpose(0, 1))
