"""Two processes, one column-parallel layer: against the undivided layer."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mindspeed_lowp import get_recipe, lowp_linear
from mindspeed_lowp.layers import TensorParallel
from mindspeed_lowp.memory import saved_bytes
from mindspeed_lowp.recipes import recipe_class, recipe_names

from .oracle import assert_product, dequantize, quantized
from .test_linear import POLICIES, make_case

RANKS = 2


def spawn(function, *args, tmp_path):
    mp.spawn(_entry, (function, str(tmp_path / "store"), *args), nprocs=RANKS)


def _entry(rank, function, store, *args):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def sequence_parallel(rank, rows, policy):
    """Each rank has `rows` rows of x and half of the weight's features."""
    x, weight, _, grad = make_case(RANKS * rows, 96, 128, bias=False)
    mine, my_features = slice(rank * rows, (rank + 1) * rows), slice(rank * 64, (rank + 1) * 64)
    w, g = weight[my_features].clone().requires_grad_(), grad[:, my_features]
    recipe = get_recipe("mxfp8", **POLICIES[policy])
    local = x[mine].clone().requires_grad_()
    parallel = TensorParallel(dist.group.WORLD, sequence_parallel=True)
    y = lowp_linear(local, w, None, recipe, parallel=parallel)
    saved = saved_bytes(y, [w])
    y.backward(g)

    assert_product(y, quantized(recipe, x, "input", -1), quantized(recipe, w.detach(), "weight", -1).mT)

    # Blocks along the rows start anew at each rank's rows, of the input and of the gradient.
    x2 = torch.cat([quantized(recipe, part, "input", -2) for part in x.split(rows)])
    g2 = torch.cat([quantized(recipe, part.contiguous(), "grad", -2) for part in g.split(rows)])
    assert_product(w.grad, g2.mT, x2)

    # Partial sums of the ranks are rounded to bf16 before they are added.
    partial = [
        quantized(recipe, grad[:, half].contiguous(), "grad", -1)
        @ quantized(recipe, weight[half].contiguous(), "weight", -2)
        for half in (slice(0, 64), slice(64, 128))
    ]
    bound = sum(2.0**-8 * part[mine].abs() for part in partial) + 2.0**-7 * sum(partial)[mine].abs() + 1e-3
    assert ((local.grad.double() - sum(partial)[mine]).abs() <= bound).all()

    if policy == "defer-weight":
        aligned = -(-rows // 64) * 64
        assert saved == aligned * 96 * 33 // 32
        if rows % 64 == 0:
            assert saved <= 0.52 * 2 * rows * 96


def sequence_parallel_cases(rank):
    for rows in (64, 40, 96):
        for policy in POLICIES:
            sequence_parallel(rank, rows, policy)


def test_sequence_parallel_column_linear(tmp_path):
    spawn(sequence_parallel_cases, tmp_path=tmp_path)


def allreduce(rank):
    x, weight, bias, grad = make_case(80, 96, 128)
    features = slice(rank * 64, (rank + 1) * 64)
    w = weight[features].clone().requires_grad_()
    b = bias[features].clone().requires_grad_()
    local = x.clone().requires_grad_()
    recipe = get_recipe("mxfp8")
    parallel = TensorParallel(dist.group.WORLD, allreduce_dgrad=True)
    y = lowp_linear(local, w, b, recipe, parallel=parallel)
    y.backward(grad[:, features])

    alone = [t.clone().requires_grad_() for t in (x, weight[features], bias[features])]
    y_alone = lowp_linear(*alone, recipe)
    y_alone.backward(grad[:, features])
    assert (
        torch.equal(y, y_alone) and torch.equal(w.grad, alone[1].grad) and torch.equal(b.grad, alone[2].grad)
    )
    gathered = [torch.empty_like(alone[0].grad) for _ in range(RANKS)]
    dist.all_gather(gathered, alone[0].grad)
    assert torch.equal(local.grad, gathered[0] + gathered[1])


def test_input_gradient_is_summed_over_the_group(tmp_path):
    spawn(allreduce, tmp_path=tmp_path)


def deferral_bits(rank):
    for rows in (64, 40):
        deferral_bits_with(rank, rows)


def deferral_bits_with(rank, rows):
    x, weight, _, grad = make_case(RANKS * rows, 96, 128, bias=False)
    parallel = TensorParallel(dist.group.WORLD, sequence_parallel=True)
    results = []
    for policy in POLICIES.values():
        local = x[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        w = weight[rank * 64 : (rank + 1) * 64].clone().requires_grad_()
        y = lowp_linear(local, w, None, get_recipe("mxfp8", **policy), parallel=parallel)
        y.backward(grad[:, rank * 64 : (rank + 1) * 64])
        results.append((y.detach(), local.grad, w.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_deferring_changes_no_bit_under_sequence_parallelism(tmp_path):
    spawn(deferral_bits, tmp_path=tmp_path)


def undivided(rank):
    """Rows that are whole in every recipe's alignment: the same operands, so the same bits."""
    rows = 128
    x, weight, _, grad = make_case(RANKS * rows, 96, 128, bias=False)
    mine, features = slice(rank * rows, (rank + 1) * rows), slice(rank * 64, (rank + 1) * 64)
    parallel = TensorParallel(dist.group.WORLD, sequence_parallel=True)
    for name in recipe_names():
        for fp8_format in recipe_class(name).formats:
            recipe = get_recipe(name, fp8_format=fp8_format)
            local, w = x[mine].clone().requires_grad_(), weight[features].clone().requires_grad_()
            y = lowp_linear(local, w, None, recipe, parallel=parallel)
            y.backward(grad[:, features])
            whole, alone = x.clone().requires_grad_(), weight[features].clone().requires_grad_()
            y_alone = lowp_linear(whole, alone, None, get_recipe(name, fp8_format=fp8_format))
            y_alone.backward(grad[:, features])
            assert torch.equal(y, y_alone), (name, fp8_format)
            assert torch.equal(w.grad, alone.grad), (name, fp8_format)
            gathered = [torch.empty_like(whole) for _ in range(RANKS)]
            dist.all_gather(gathered, whole.grad)
            assert torch.equal(local.grad, sum(gathered)[mine]), (name, fp8_format)


def test_every_recipe_under_sequence_parallelism_is_that_of_the_undivided_layer(tmp_path):
    spawn(undivided, tmp_path=tmp_path)


def test_gathered_operand_dequantizes_to_the_ranks_rows():
    """What concatenating aligned operands means, in one process."""
    x, *_ = make_case(128, 96)
    recipe = get_recipe("mxfp8")
    parts = [recipe.quantize(part, "input", (-2,))[-2] for part in x.split(64)]
    joined = type(parts[0])(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    assert torch.equal(dequantize(joined, -2), quantized(recipe, x, "input", -2))
