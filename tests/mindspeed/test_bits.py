"""MindSpeed's unmodified matrix-product functions and ours, on the same tensors: the same bits.

Output, input gradient and weight gradient, of shapes with tails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mindspeed_lowp import emulator, get_recipe, lowp_grouped_linear, lowp_linear

COUNTS = [40, 0, 24, 33]
SHAPES = [((3, 50, 96), 72), ((130, 200), 136), ((64, 64), 64)]


def _start() -> None:
    """MindSpeed alone, patched into Megatron-LM, in this process."""
    torch.set_num_threads(1)
    sys.path[:0] = [os.environ["MINDSPEED_PATH"], os.environ["MEGATRON_LM_PATH"]]
    sys.argv[:] = ["train.py", "--fp8-format", "e4m3", "--num-experts", "4", "--moe-grouped-gemm"]
    emulator.install()
    import mindspeed.megatron_adaptor  # noqa: F401


@pytest.fixture(scope="module")
def mindspeed() -> Iterator[Callable[..., None]]:
    """Calls a module-level function in a process where MindSpeed runs on the emulator."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result()


def theirs(fp8_format: str, recipe: str) -> SimpleNamespace:
    """MindSpeed's classes, told of a format and a recipe."""
    from mindspeed import args_utils
    from mindspeed.core.transformer.moe import grouped_matmul_util as gmm
    from mindspeed.te.pytorch import utils
    from mindspeed.te.pytorch.fp8 import recipes
    from mindspeed.te.pytorch.module import grouped_linear

    args = args_utils.get_mindspeed_args()
    args.fp8, args.fp8_recipe, args.gemm_gradient_accumulation_fusion = fp8_format, recipe, False
    utils.get_quant_dtype.cache_clear()
    dense = {
        "mxfp8": recipes.MXFP8MatMul,
        "mxfp8-32x32": recipes.MXFP832x32MatMul,
        "tensorwise": recipes.TensorwiseMatMul,
        "blockwise": recipes.Float8BlockMatMul,
    }
    grouped = {
        "mxfp8": gmm.MXFP8GMMFunction,
        "mxfp8-32x32": gmm.MXFP832x32GMMFunction,
        "tensorwise": gmm.TensorwiseGMMFunction,
    }
    separate = {
        "mxfp8": grouped_linear.MindSpeedTEGroupedLinearMXFP8GMM,
        "mxfp8-32x32": grouped_linear.MindSpeedTEGroupedLinearMXFP832x32GMM,
    }
    return SimpleNamespace(
        dense=dense[recipe], grouped=grouped.get(recipe), separate=separate.get(recipe), gmm=gmm
    )


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    result.backward(random(*result.shape, seed=9))
    return [result.detach(), *(x.grad for x in leaves)]


def same(results: list[Tensor], others: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(results, others, strict=True)]


def check_dense(recipe: str, fp8_format: str, defer: bool) -> None:
    product = theirs(fp8_format, recipe).dense
    ours = get_recipe(recipe, fp8_format=fp8_format, **({"defer_backward_quant": True} if defer else {}))
    for shape, width in SHAPES:
        x, w = random(*shape), random(width, shape[-1], seed=1)
        results = gradients(lambda x, w: lowp_linear(x, w, None, ours), x, w)
        assert same(results, gradients(lambda x, w: product.apply(x, w), x, w)) == [True] * 3, shape


@pytest.mark.parametrize(
    ("recipe", "fp8_format", "defer"),
    [
        ("mxfp8", "e4m3", False),
        ("mxfp8", "e4m3", True),
        ("mxfp8", "hybrid", False),
        ("mxfp8-32x32", "e4m3", False),
        ("mxfp8-32x32", "hybrid", False),
        ("tensorwise", "e4m3", False),
        ("tensorwise", "hybrid", False),
        ("tensorwise", "hif8", False),
        ("blockwise", "e4m3", False),
        ("blockwise", "hybrid", False),
    ],
)
def test_linears(mindspeed, recipe, fp8_format, defer):
    mindspeed(check_dense, recipe, fp8_format, defer)


def check_grouped(recipe: str, fp8_format: str, defer: bool) -> None:
    functions = theirs(fp8_format, recipe)
    ours = get_recipe(recipe, fp8_format=fp8_format, **({"defer_backward_quant": True} if defer else {}))
    x, w = random(sum(COUNTS), 96), random(len(COUNTS), 96, 72, seed=1)
    results = gradients(lambda x, w: lowp_grouped_linear(x, w, COUNTS, ours), x, w)
    expected = gradients(lambda x, w: functions.grouped.gmm_apply(x, w, None, COUNTS, w), x, w)
    assert same(results, expected) == [True] * 3

    weights = [random(72, 96, seed=i) for i in range(len(COUNTS))]
    results = gradients(lambda x, *w: lowp_grouped_linear(x, w, COUNTS, ours), x, *weights)
    expected = gradients(
        lambda x, *w: functions.separate.apply(x, COUNTS, list(w), *(v.T.contiguous() for v in w)),
        x,
        *weights,
    )
    assert same(results, expected) == [True] * 6


@pytest.mark.parametrize(
    ("recipe", "fp8_format", "defer"),
    [
        ("mxfp8", "e4m3", False),
        ("mxfp8", "e4m3", True),
        ("mxfp8", "hybrid", False),
        ("mxfp8-32x32", "e4m3", False),
        ("mxfp8-32x32", "hybrid", False),
    ],
)
def test_experts(mindspeed, recipe, fp8_format, defer):
    mindspeed(check_grouped, recipe, fp8_format, defer)


def check_main_grad() -> None:
    functions = theirs("e4m3", "mxfp8")
    x, w = random(sum(COUNTS), 96), random(len(COUNTS), 96, 72, seed=1)
    start = torch.randn(w.shape, generator=torch.Generator().manual_seed(5))

    def added(multiply: Callable[[Tensor], Tensor], parameter: Tensor) -> Tensor:
        parameter.main_grad, parameter.grad_added_to_main_grad = start.clone(), False
        multiply(parameter).backward(random(len(x), 72, seed=9))
        assert parameter.grad_added_to_main_grad
        return parameter.main_grad

    from mindspeed import args_utils

    args_utils.get_mindspeed_args().gemm_gradient_accumulation_fusion = True
    parameters = [w.clone().requires_grad_() for _ in range(2)]
    ours = added(
        lambda p: lowp_grouped_linear(x, p, COUNTS, get_recipe("mxfp8"), into_main_grad=True), parameters[0]
    )
    expected = added(lambda p: functions.grouped.gmm_apply(x, p, None, COUNTS, p), parameters[1])
    assert torch.equal(ours, expected) and not torch.equal(ours, start)


def test_gradients_added_to_main_grad(mindspeed):
    mindspeed(check_main_grad)


def check_one_scale() -> None:
    """FP8 tensorwise: theirs has one scale for all tokens, ours one for each expert's."""
    functions, ours = theirs("e4m3", "tensorwise"), get_recipe("tensorwise")
    for counts, expected in (([97], [True] * 3), (COUNTS, [False] * 3)):
        x, w = random(97, 96), random(len(counts), 96, 72, seed=1)
        mine = gradients(lambda x, w: lowp_grouped_linear(x, w, counts, ours), x, w)  # noqa: B023
        its = gradients(lambda x, w: functions.grouped.gmm_apply(x, w, None, counts, w), x, w)  # noqa: B023
        assert same(mine, its) == expected


def test_tensorwise_experts_differ_by_design_in_more_than_one(mindspeed):
    mindspeed(check_one_scale)


def check_target() -> None:
    """HiFloat8: its comparison of `qdtype`, an object, with the format never holds.

    So the amax of inputs and weights goes to 32768; compared rightly, to 15 as in its linears, and as ours.
    """
    functions, ours = theirs("hif8", "tensorwise"), get_recipe("hif8")
    x, w = random(97, 96), random(1, 96, 72, seed=1)
    mine = gradients(lambda x, w: lowp_grouped_linear(x, w, [97], ours), x, w)

    def its() -> list[Tensor]:
        return gradients(lambda x, w: functions.grouped.gmm_apply(x, w, None, [97], w), x, w)

    assert same(mine, its()) == [False] * 3
    qdtype = functions.gmm.get_quant_dtype()
    type(qdtype).__eq__ = lambda self, other: self.x == other  # what was meant
    try:
        assert same(mine, its()) == [True] * 3
    finally:
        del type(qdtype).__eq__


def test_hifloat8_experts_differ_by_the_target_alone(mindspeed):
    mindspeed(check_target)


def check_blockwise() -> None:
    theirs("e4m3", "blockwise")
    from mindspeed import args_utils
    from mindspeed.core.transformer.moe.grouped_matmul_util import get_gmm_quant_func

    args_utils.get_mindspeed_args().use_gmm_fp8 = True
    assert get_gmm_quant_func() is None


def test_it_has_no_blockwise_experts(mindspeed):
    mindspeed(check_blockwise)
