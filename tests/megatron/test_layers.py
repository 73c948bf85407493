"""Megatron's parallel linears and experts with a recipe, by themselves and in a model: every product.

These run with each version of Megatron core that is supported (scripts/test_matrix.sh).
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_lowp import convert_model, get_recipe
from mindspeed_lowp.layers import Choice, by_name

from ..layers.oracle import assert_product, quantized, rounding_bound
from .products import Recorded, assert_experts, assert_linear, rows
from .ranks import on_ranks

HIDDEN, SEQUENCE, BATCH = 64, 32, 4


def make_config(**options):
    from megatron.core.transformer import TransformerConfig

    defaults = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": dist.get_world_size(),
    }
    return TransformerConfig(**{**defaults, **options})


def make_linear(kind: str, config, **options) -> nn.Module:
    """A converted linear of 96 inputs and 64 outputs; its weights are those of any number of ranks."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    import mindspeed_lowp.megatron.own_layers  # noqa: F401 - tells convert_model of these layers

    torch.manual_seed(3)
    options |= {"gather_output": False} if kind == "column" else {"input_is_parallel": True}
    cls = {"column": ColumnParallelLinear, "row": RowParallelLinear}[kind]
    linear = cls(96, 64, config=config, init_method=nn.init.normal_, bias=True, skip_bias_add=True, **options)
    convert_model(linear, get_recipe("mxfp8", fp8_format="hybrid"))
    return linear


def make_tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [128, 1, 96], output gradient [128, 1, 64]"""
    gen = torch.Generator().manual_seed(4)
    return tuple(torch.randn(128, 1, width, generator=gen).to(dtype) for width in (96, 64))


def mine(x: Tensor, dim: int) -> Tensor:
    """This rank's part."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def everyones(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def assert_sum(actual: Tensor, products: list[tuple[Tensor, Tensor]]) -> None:
    """actual is the sum of the ranks' products, each rounded to its dtype before and after it is added."""
    total = sum(left @ right for left, right in products)
    rounded = torch.finfo(actual.dtype).eps * total.abs()
    bound = sum(rounding_bound(left, right, actual.dtype) for left, right in products) + rounded
    assert ((actual.double() - total).abs() <= bound).all()


def column(dtype: torch.dtype, sequence_parallel: bool) -> None:
    config = make_config(params_dtype=dtype, sequence_parallel=sequence_parallel)
    linear, recipe = make_linear("column", config), get_recipe("mxfp8", fp8_format="hybrid")
    x, grad = make_tensors(dtype)
    local = (mine(x, 0) if linear.sequence_parallel else x.clone()).requires_grad_()
    y, bias = linear(local)
    assert bias is linear.bias
    y.backward(mine(grad, -1))

    weight, g = linear.weight.detach(), rows(mine(grad, -1))
    assert_product(
        rows(y), quantized(recipe, rows(x), "input", -1), quantized(recipe, weight, "weight", -1).mT
    )
    x2 = torch.cat([quantized(recipe, part, "input", -2) for part in rows(x).split(len(local))])
    assert_product(linear.weight.grad, quantized(recipe, g, "grad", -2).mT, x2)
    products = [
        (quantized(recipe, part, "grad", -1), quantized(recipe, w, "weight", -2))
        for part, w in zip(map(rows, everyones(mine(grad, -1))), everyones(weight), strict=True)
    ]
    part = slice(dist.get_rank() * len(local), None) if linear.sequence_parallel else slice(None)
    assert_sum(rows(local.grad), [(g[part][: len(local)], w) for g, w in products])


def row(dtype: torch.dtype, sequence_parallel: bool) -> None:
    config = make_config(params_dtype=dtype, sequence_parallel=sequence_parallel)
    linear, recipe = make_linear("row", config), get_recipe("mxfp8", fp8_format="hybrid")
    x, grad = make_tensors(dtype)
    local = mine(x, -1).requires_grad_()
    y, bias = linear(local)
    assert bias is linear.bias
    g = mine(grad, 0) if sequence_parallel else grad
    y.backward(g)

    weight = linear.weight.detach()
    products = [
        (quantized(recipe, rows(part), "input", -1), quantized(recipe, w, "weight", -1).mT)
        for part, w in zip(everyones(local.detach()), everyones(weight), strict=True)
    ]
    part = slice(dist.get_rank() * len(y), None) if sequence_parallel else slice(None)
    assert_sum(rows(y), [(x[part][: len(y)], w) for x, w in products])
    g = rows(grad)
    assert_product(
        rows(local.grad), quantized(recipe, g, "grad", -1), quantized(recipe, weight, "weight", -2)
    )
    x2 = quantized(recipe, rows(local), "input", -2)
    assert_product(linear.weight.grad, quantized(recipe, g, "grad", -2).mT, x2)


def linears() -> None:
    sequence_parallel = (False, True) if dist.get_world_size() > 1 else (False,)
    for check, dtype, parallel in itertools.product(
        (column, row), (torch.bfloat16, torch.float32), sequence_parallel
    ):
        check(dtype, parallel)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parallel_linears(tmp_path, ranks):
    on_ranks(ranks, linears, tmp_path)


def make_model(**options) -> nn.Module:
    """A GPT of one layer, with four grouped experts if `options` say num_moe_experts."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mindspeed_lowp.hosts.patch_manager import PatchManager
    from mindspeed_lowp.megatron.own_layers import grouped_experts_patches

    config = make_config(add_bias_linear=False, **options)
    if config.num_moe_experts:
        patches = PatchManager()
        for name, replacement in grouped_experts_patches().items():
            patches.register_patch(name, replacement)
        patches.apply_patches()
    torch.manual_seed(5)
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=True)
    model = GPTModel(config, spec, vocab_size=128, max_sequence_length=SEQUENCE).bfloat16()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def convert(model: nn.Module, recipe) -> dict[str, Recorded]:
    from mindspeed_lowp.megatron import own_layers  # noqa: F401 - tells convert_chunks of Megatron's layers
    from mindspeed_lowp.megatron.convert import convert_chunks

    report = convert_chunks([model], by_name(Choice(recipe), Choice(recipe)), lambda conversion: None)
    assert report.kept == ["output_layer"] * ("output_layer" in report.kept)
    layers = dict(model.named_modules())
    return {name: Recorded(layers[name]) for name in report.converted}


def step(model: nn.Module) -> Tensor:
    """Forward and backward of some tokens; the loss."""
    tokens = torch.randint(128, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(6))
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).sum()
    loss.backward()
    return loss


def experts_weights(experts: nn.Module, name: str) -> tuple[list[Tensor], list[Tensor]]:
    """The weights [N, K] of `linear_fc1` or `linear_fc2`, and their gradients."""
    if hasattr(experts, "weight1"):
        hidden = experts.config.hidden_size
        parameter, shape = {
            "linear_fc1": (experts.weight1, (experts.num_local_experts, hidden, -1)),
            "linear_fc2": (experts.weight2, (experts.num_local_experts, -1, hidden)),
        }[name]
        return tuple(list(t.view(shape).mT) for t in (parameter.detach(), parameter.grad))
    layer = getattr(experts, name)
    parameters = [getattr(layer, f"weight{index}") for index in range(layer.num_gemms)]
    return [p.detach() for p in parameters], [p.grad for p in parameters]


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}


def model_of_one_rank(options: dict, policy: dict) -> None:
    recipe = get_recipe("mxfp8", **policy)
    model = make_model(**options)
    records = convert(model, recipe)
    step(model)
    blocks, experts = "decoder.layers.0.", "decoder.layers.0.mlp.experts."
    attention = {f"{blocks}self_attention.linear_qkv", f"{blocks}self_attention.linear_proj"}
    mlp = {f"{experts if options else blocks + 'mlp.'}{name}" for name in ("linear_fc1", "linear_fc2")}
    assert records.keys() == attention | mlp
    for name, record in records.items():
        if name.startswith(experts):
            owner, _, linear = name.rpartition(".")
            assert sum(record.counts) == 2 * SEQUENCE * BATCH
            assert_experts(record, *experts_weights(model.get_submodule(owner), linear), recipe)
        else:
            assert_linear(record, recipe)


@pytest.mark.parametrize("policy", [{}, {"defer_backward_quant": True, "defer_operands": "all"}])
@pytest.mark.parametrize(
    "options", [{}, MOE, {**MOE, "gated_linear_unit": True}], ids=["dense", "moe", "glu"]
)
def test_every_product_of_a_model(tmp_path, options, policy):
    on_ranks(1, model_of_one_rank, tmp_path, options, policy)


def experts_of_two_ranks() -> None:
    """Each rank has half of every expert's features."""
    recipe = get_recipe("mxfp8")
    model = make_model(**MOE, sequence_parallel=True)
    records = convert(model, recipe)
    step(model)
    for name, record in records.items():
        if "experts" in name:
            owner, _, linear = name.rpartition(".")
            weights, grads = experts_weights(model.get_submodule(owner), linear)
            assert weights[0].shape == {"linear_fc1": (128, 64), "linear_fc2": (64, 128)}[linear]
            assert_experts(record, weights, grads, recipe)


def test_experts_divided_over_two_ranks(tmp_path):
    on_ranks(2, experts_of_two_ranks, tmp_path, expert_tensor_parallel_size=2)


def reuse() -> None:
    """Reused weights give the same bits, and a weight that changed is quantized again."""
    from mindspeed_lowp.layers import drop_reused_weights, reuse_quantized_weights, reused_bytes

    results = []
    for reused in (False, True):
        model = make_model(**MOE)
        convert(model, get_recipe("mxfp8"))
        assert reuse_quantized_weights(model, check=True) == 4 if reused else True
        losses = [step(model), step(model)]
        if reused:
            experts = model.decoder.layers[0].mlp.experts
            held = reused_bytes(experts)
            elements = sum(parameter.numel() for parameter in experts.parameters())
            assert held == 2 * elements * 33 // 32
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        losses.append(step(model))
        results.append((losses, [parameter.grad for parameter in model.parameters()]))
        drop_reused_weights()
    (losses, grads), (other_losses, other_grads) = results
    assert losses == other_losses and losses[0] == losses[1] != losses[2]
    assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True))


def test_reusing_quantized_weights_changes_no_bit(tmp_path):
    on_ranks(1, reuse, tmp_path)
