"""Quantizers and casts against torch_npu's wheel, over arguments drawn at random, wrong ones among them.

Tensors have no data: shapes, dtypes and refusals are all that meta functions know.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_lowp import ops
from mindspeed_lowp.ops import npu
from tests.oracles.test_torch_npu_wheel import npu_call, torch_npu  # noqa: F401 (a fixture)

FP32 = torch.float32
FP8, FP4 = [23, 24, 291, 292, torch.float8_e4m3fn, torch.float8_e5m2], [296, 297, torch.float4_e2m1fn_x2]
OTHER_CODES = [1, 290, 293, 7, 1000]
MATRICES = [(70, 40), (64, 128), (33, 66), (1, 2), (37, 1), (0, 64), (64, 0)]
MORE_DIMENSIONS = [(2, 40, 64), (2, 3, 5, 32), (2, 2, 2, 2, 33, 2), (1, 2, 1, 2, 1, 2, 64)]


def draw(r: random.Random, good: list, wrong: list, share: float = 0.08):
    return r.choice(wrong if r.random() < share else good)


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def draw_x(r: random.Random, shapes: list) -> torch.Tensor:
    dtype = draw(r, [torch.bfloat16, torch.float16], [torch.float32, torch.float64, torch.int8], 0.15)
    return tensor(draw(r, shapes, [(), (64,), (7,), (1,) * 7 + (32,)]), dtype)


def how(r: random.Random) -> dict[str, Any]:
    """Arguments that all MX quantizers have."""
    formats = draw(r, [FP8, FP4], [OTHER_CODES])
    fp4 = formats is FP4
    algorithm = draw(r, [0, 2] if fp4 else [0, 1], [0, 1, 2, 3, -1])
    return {
        "round_mode": draw(r, ["rint", "floor", "round"] if fp4 else ["rint"], ["floor", "ceil"]),
        "dst_type": r.choice(formats),
        "scale_alg": algorithm,
        "dst_type_max": draw(r, [0.0, 6.0, 7.0] if algorithm == 2 else [0.0], [448.0, -1.0]),
    }


def one_axis(r):
    return [draw_x(r, [*MATRICES, *MORE_DIMENSIONS, (64,), (7,)])], how(r) | {
        "axis": draw(r, [-1, -1, -2, 0], [1, 2, 5, -4]),
        "block_size": draw(r, [32, 32, 64, 96, 1024], [0, 16, 48, 1056, -32]),
        "max_low_bound": draw(r, [0.0], [1e-5, -1.0]),
    }


def two_axes(r):
    return [draw_x(r, MATRICES + MORE_DIMENSIONS)], how(r)


def grouped(r):
    shape, dtype = (
        draw(r, [(3,), (1,), (8,)], [(0,), (2, 2), ()]),
        draw(r, [torch.int64, torch.int32], [torch.float32]),
    )
    arguments = how(r) | {"blocksize": draw(r, [32], [64, 0])}
    return [draw_x(r, MATRICES), tensor(shape, dtype)], arguments


def backwards(r):
    code, axis = r.choice([291, 292, 296, 297]), r.choice([-1, -2, 0])
    x = tensor(r.choice([(70, 40), (64, 128), (2, 40, 64)]), torch.bfloat16)
    y, mxscale = ops.dynamic_mx_quant(x, axis=axis, dst_type=code)
    return [draw(r, [y], [x, y[..., :1], y[:0]]), draw(r, [mxscale], [mxscale[..., :1], mxscale.float()])], {
        "axis": draw(r, [axis], [3, -5]),
        "dst_type": draw(r, [5, 6, 15, torch.bfloat16, torch.float32], [1000]),
        "src_type": draw(r, [code], [292, 7]),
    }


EIGHT_BITS, NOT_EIGHT_BITS = [1, 290, *FP8], [0, 7, 293, 296, 297, 1000]


def dynamic(r):
    x, mode = draw_x(r, MATRICES + MORE_DIMENSIONS), r.choice(["pertoken", "perchannel", "pertensor"])
    code = draw(r, EIGHT_BITS, NOT_EIGHT_BITS)
    arguments = {
        "dst_type": code,
        "quant_mode": draw(r, [mode], ["pergroup"]),
        "dst_type_max": draw(r, [0.0, 15.0] if code == 290 else [0.0], [-1.0, 224.0]),
    }
    if r.random() < 0.3 and x.dim() > 1:
        groups = r.random() < 0.3
        length = x.shape[-2 if mode == "perchannel" else -1]
        shape = draw(r, [(3, length) if groups else (length,)], [(1,), (length + 1,)])
        arguments["smooth_scales"] = tensor(shape, draw(r, [x.dtype], [FP32]))
        if groups:
            arguments["group_index"] = tensor((3,), draw(r, [torch.int32, torch.int64], [FP32]))
    return [x], arguments


def tiles(r):
    code = draw(r, EIGHT_BITS, NOT_EIGHT_BITS)
    return [draw_x(r, [*MATRICES, (2, 40, 64), (3, 130, 257)])], {
        "min_scale": draw(r, [0.0, 0.1], [-1.0]),
        "round_mode": draw(r, ["round" if code == 290 else "rint"], ["floor"]),
        "dst_type": code,
        "row_block_size": draw(r, [1, 128, 256, 512], [2, 0]),
        "col_block_size": draw(r, [64, 128, 192, 256], [100, 0]),
        "dst_type_max": draw(r, [0.0, 15.0] if code == 290 else [0.0], [-1.0]),
    }


def given_scales(r):
    x = draw_x(r, [*MATRICES, *MORE_DIMENSIONS, (64,)])
    divide = r.random() < 0.5
    axis = r.choice([-1, -2] if x.dim() > 1 else [-1])
    length = x.shape[axis] if x.dim() else 1
    shape = draw(r, [(1,), (length,)], [(length + 1,), (2, 2)])
    dtype = draw(r, [FP32 if divide else x.dtype], [torch.float16])
    zeros = draw(r, [None, tensor(shape, dtype)], [tensor((7,), dtype)])
    code = draw(r, EIGHT_BITS, NOT_EIGHT_BITS)
    return [x, tensor(shape, dtype), zeros], {"dtype": code, "axis": draw(r, [axis], [9]), "div_mode": divide}


DRAW: dict[str, Callable[[random.Random], tuple[list, dict[str, Any]]]] = {
    "dynamic_mx_quant": one_axis,
    "dynamic_mx_quant_with_dual_axis": two_axes,
    "dynamic_block_mx_quant": two_axes,
    "grouped_dynamic_mx_quant": grouped,
    "anti_mx_quant": backwards,
    "dynamic_quant": dynamic,
    "dynamic_block_quant": tiles,
    "quantize": given_scales,
}


class OnNpu(TorchDispatchMode):
    """Our operators as an NPU runs them: what `ops/npu` calls, and nothing else of ours."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lowp":
            return npu_call(func._schema.name.removeprefix("lowp::"))(*args)
        return func(*args, **(kwargs or {}))


def layout(results) -> list[tuple[torch.Size, torch.dtype]]:
    return [(t.shape, t.dtype) for t in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.parametrize("name", DRAW)
def test_shapes_and_dtypes_are_the_wheels_and_what_it_refuses_is_refused(name, torch_npu, monkeypatch):  # noqa: F811
    """And on an NPU, each call that we accept arrives at one that the wheel accepts."""
    monkeypatch.setattr(npu, "torch_npu", lambda: torch_npu)
    ours, theirs = getattr(ops, name), getattr(torch_npu, f"npu_{name}")
    r = random.Random(0)
    refused = accepted = 0
    for _ in range(600):
        tensors, arguments = DRAW[name](r)
        shown = [t if t is None else (tuple(t.shape), t.dtype) for t in tensors], arguments
        try:
            expected = layout(theirs(*tensors, **arguments))
        except (RuntimeError, ArithmeticError, LookupError, ValueError, TypeError):
            refused += 1
            with pytest.raises((ValueError, RuntimeError)):
                pytest.fail(f"refused by the wheel: {shown} -> {ours(*tensors, **arguments)}")
            continue
        try:
            actual = layout(ours(*tensors, **arguments))
        except (ValueError, RuntimeError):
            continue  # the operators' documents take less than the meta functions
        accepted += 1
        assert actual == expected, shown
        with OnNpu():
            assert layout(ours(*tensors, **arguments)) == expected, shown
    assert refused > 10 or name == "quantize"  # whose meta function refuses nothing
    assert accepted > 100
