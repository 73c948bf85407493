"""Every mode of the matmuls against torch_npu's wheel: its schemas and meta functions accept our calls, and
what they refuse is refused here."""

from itertools import combinations

import pytest
import torch

from mindspeed_lowp import ops
from mindspeed_lowp.ops import npu
from tests.ops.test_matmul_arguments import CALLS, call
from tests.ops.test_registration import matmul_modes
from tests.oracles.test_torch_npu_wheel import npu_call, torch_npu  # noqa: F401 (a fixture)

MODES = matmul_modes()


def meta(value):
    """Tensors, in lists too, without data: shape, strides and dtype are what meta functions see."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return [meta(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("mode", MODES)
def test_the_wheel_accepts_our_call_and_returns_our_shapes_and_dtypes(mode, torch_npu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(npu, "torch_npu", lambda: torch_npu)
    name = mode.split(",")[0]
    arguments = [meta(a) for a in MODES[mode]]
    theirs = npu_call(name)(*arguments)
    ours = getattr(torch.ops.lowp, name)(*arguments)
    if ours is not None:
        assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)


KINDS = [None, 290, 292, 293, 296, 297]
SIZES = [None, [1, 1, 32], [1, 128, 128], [128, 128, 128], [1, 1, 64], [128, 1, 128], [1, 128], [2, 2, 2]]


def changes(argument: str, value: object) -> list:
    """Other values of an argument, wrong ones among them."""
    if argument == "group_sizes":
        return SIZES
    if argument in ("group_type", "split_item", "group_list_type"):
        return [0, 2, 3, 5]
    if argument.endswith("_dtype"):
        return [None, 5, 15, 6, 3] if argument == "output_dtype" else KINDS
    if isinstance(value, list):
        return [[v] for v in changes("", value[0])]
    if argument == "group_list":
        return []
    others = [value[:1], value[..., :1], value[None], value.flatten(), value.view(torch.uint8)]
    return [*others, value.float(), value.new_zeros(1), value.transpose(-1, -2) if value.dim() > 1 else value]


OPTIONAL = {
    ops.quant_matmul: {
        "bias": [
            torch.zeros(40),
            torch.zeros(1),
            torch.zeros(1, 1, 40),
            torch.zeros(40).half(),
            torch.zeros(80),
        ],
        **dict.fromkeys(["x1_dtype", "x2_dtype", "scale_dtype", "pertoken_scale_dtype"]),
        "group_sizes": None,
    },
    ops.grouped_matmul: {
        **dict.fromkeys(
            ["x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype", "group_list_type"]
        )
    },
    ops.add_quant_matmul_: dict.fromkeys(["x1_dtype", "x2_dtype", "group_sizes"]),
    ops.add_quant_gmm_: {
        **dict.fromkeys(["x1_dtype", "x2_dtype", "x1_scale_dtype", "x2_scale_dtype", "group_sizes"])
    },
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_calls_that_the_wheel_refuses_are_refused_and_others_have_its_shapes(function, torch_npu):  # noqa: F811
    """Calls that work, with one or two arguments changed."""
    theirs = getattr(torch_npu, f"npu_{function.__name__}")
    refused = accepted = 0
    for good in CALLS[function]:
        given = {name: changes(name, value) for name, value in good.items()}
        added = {name: values or changes(name, None) for name, values in OPTIONAL[function].items()}
        single = [(name, value) for name, values in (given | added).items() for value in values]
        for change in [*combinations(single, 1), *combinations(single[::3], 2)]:
            arguments = good | dict(change)
            try:
                expected = call(theirs, {}, **{name: meta(value) for name, value in arguments.items()})
            except Exception:
                refused += 1
                with pytest.raises((ValueError, RuntimeError)):
                    call(function, arguments)
                continue
            try:
                actual = call(function, arguments)
            except ValueError:
                continue  # the operators' documents take less than the meta functions
            accepted += 1
            if function is ops.grouped_matmul:
                (actual,), (expected,) = actual, expected
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), change
    assert refused > 50 or function is ops.add_quant_matmul_  # whose meta function refuses nothing
    assert accepted > 5
