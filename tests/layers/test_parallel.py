"""Two processes, one column-parallel layer: against the undivided layer."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mindspeed_lowp import get_recipe, lowp_linear
from mindspeed_lowp.layers import TensorParallel
from mindspeed_lowp.memory import saved_bytes
from mindspeed_lowp.recipes import recipe_class, recipe_names
from mindspeed_lowp.recipes.delayed import advance

from .oracle import assert_product, dequantize, quantized
from .test_linear import POLICIES, make_case

RANKS = 2

mp.get_context("forkserver").set_forkserver_preload(["mindspeed_lowp"])  # imported once, not by every process


def spawn(function, *args, tmp_path):
    arguments = (function, str(tmp_path / "store"), *args)
    mp.start_processes(_entry, arguments, nprocs=RANKS, start_method="forkserver")


def _entry(rank, function, store, *args):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def every_recipe():
    return [(name, fp8_format) for name in recipe_names() for fp8_format in recipe_class(name).formats]


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
    for name, fp8_format in every_recipe():
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


def quantized_gather(rank):
    """Gathering codes and scales gives what gathering the input does, with fewer bytes on the way."""
    gather, sent = dist.all_gather_into_tensor, []

    def counting(out, tensor, **kwargs):
        sent.append(tensor.nbytes)
        return gather(out, tensor, **kwargs)

    dist.all_gather_into_tensor = counting
    for rows, (name, fp8_format) in itertools.product((128, 40), every_recipe()):
        x, weight, _, grad = make_case(RANKS * rows, 96, 128, bias=False)
        mine, features = slice(rank * rows, (rank + 1) * rows), slice(rank * 64, (rank + 1) * 64)
        results, nbytes = [], []
        for gathers_codes in (False, True):
            recipe = get_recipe(name, fp8_format=fp8_format)
            recipe = recipe.for_layer({"input": dist.group.WORLD} if gathers_codes else {})
            parallel = TensorParallel(
                dist.group.WORLD, sequence_parallel=True, quantized_gather=gathers_codes
            )
            local, w = x[mine].clone().requires_grad_(), weight[features].clone().requires_grad_()
            sent.clear()
            y = lowp_linear(local, w, None, recipe, parallel=parallel)
            nbytes.append(sum(sent))
            y.backward(grad[:, features])
            results.append((y.detach(), local.grad, w.grad))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b), (rows, name, fp8_format)
        scales = {"mxfp8": 4, "mxfp8-32x32": 4, "blockwise": 4}.get(name, 0)  # bytes for a row of 96
        assert nbytes == [rows * 96 * 2, rows * (96 + scales)], (rows, name, nbytes)


def test_rows_gathered_quantized_change_no_bit(tmp_path):
    spawn(quantized_gather, tmp_path=tmp_path)


def undivided_scale(rank):
    parallel = TensorParallel(dist.group.WORLD, sequence_parallel=True, quantized_gather=True)
    x, weight, *_ = make_case(128, 96, 128, bias=False)
    with pytest.raises(ValueError, match="quantized_gather: tensorwise has one scale for all ranks' rows"):
        lowp_linear(x, weight, None, get_recipe("tensorwise"), parallel=parallel)


def test_a_scale_of_one_rank_is_not_taken_for_that_of_all(tmp_path):
    spawn(undivided_scale, tmp_path=tmp_path)


def codes(operand):
    return operand.data.contiguous().view(torch.uint8)


def parts(rank):
    """Cut where every recipe's blocks end, each rank's part has the codes that it has in the whole."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[:, :128] *= 16  # the ranks' magnitudes differ
    for (name, fp8_format), dtype in itertools.product(every_recipe(), (torch.bfloat16, torch.float32)):
        for role, dim in itertools.product(("input", "weight", "grad"), (0, 1)):
            whole, mine = x.to(dtype), x.to(dtype).chunk(RANKS, dim)[rank].contiguous()
            recipe = get_recipe(name, fp8_format=fp8_format).for_layer({role: dist.group.WORLD})
            expected = get_recipe(name, fp8_format=fp8_format).quantize(whole, role, (-1, -2))
            for axis, operand in recipe.quantize(mine, role, (-1, -2)).items():
                case = (name, fp8_format, dtype, role, dim, axis)
                assert torch.equal(codes(operand), codes(expected[axis]).chunk(RANKS, dim)[rank]), case
                if operand.scale.dim() == 1:
                    assert torch.equal(operand.scale, expected[axis].scale), case


def test_a_part_of_a_divided_tensor_is_quantized_as_in_the_whole(tmp_path):
    spawn(parts, tmp_path=tmp_path)


def parts_of_experts(rank):
    """Tokens by expert, their features divided: an expert's scale is that of all its features."""
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[:, :32] *= 16
    group_list = torch.tensor([3, 3, 40])
    for name, fp8_format in every_recipe():
        recipe = get_recipe(name, fp8_format=fp8_format)
        expected = recipe.quantize_groups(x, "input", group_list, (-1,))[-1]
        if expected.scale.dim() == 1:
            layer = recipe.for_layer({"input": dist.group.WORLD})
            mine = layer.quantize_groups(x.chunk(RANKS, 1)[rank].contiguous(), "input", group_list, (-1,))[-1]
            assert torch.equal(codes(mine), codes(expected).chunk(RANKS, 1)[rank]), (name, fp8_format)
            assert torch.equal(mine.scale, expected.scale), (name, fp8_format)


def test_a_part_of_experts_tokens_is_quantized_as_in_the_whole(tmp_path):
    spawn(parts_of_experts, tmp_path=tmp_path)


def broken_part(rank):
    x = torch.ones(2, 4).bfloat16()
    for value, broken in itertools.product((float("nan"), -float("nan"), float("inf")), range(RANKS)):
        for name in ("tensorwise", "hif8", "delayed"):
            recipe = get_recipe(name).for_layer({"input": dist.group.WORLD})
            mine = x.clone()
            mine[1, 2] = value if rank == broken else 1.0
            scale = recipe.quantize(mine, "input", (-1,))[-1].scale
            assert not scale.isfinite(), (name, value, broken, scale)


def test_what_is_broken_in_one_part_is_seen_on_every_rank(tmp_path):
    spawn(broken_part, tmp_path=tmp_path)


def past_magnitudes(rank):
    """Only the first step asks the others within a layer; afterwards the past is common to all."""
    recipe = get_recipe("delayed").for_layer({"input": dist.group.WORLD})
    for step in range(3):
        x = torch.full((2, 4), 2.0**step * (rank + 1)).bfloat16()
        scale = recipe.quantize(x, "input", (-1,))[-1].scale
        latest = 2.0 if step == 0 else 2.0 ** (step - 1) * RANKS
        assert torch.equal(scale, torch.tensor([latest]) * torch.tensor(1 / 448.0)), step
        advance([recipe], dist.group.WORLD)


def test_delayed_scaling_of_a_divided_tensor_goes_by_the_past_of_all_parts(tmp_path):
    spawn(past_magnitudes, tmp_path=tmp_path)


def test_gathered_operand_dequantizes_to_the_ranks_rows():
    """What concatenating aligned operands means, in one process."""
    x, *_ = make_case(128, 96)
    recipe = get_recipe("mxfp8")
    parts = [recipe.quantize(part, "input", (-2,))[-2] for part in x.split(64)]
    joined = type(parts[0])(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    assert torch.equal(dequantize(joined, -2), quantized(recipe, x, "input", -2))
