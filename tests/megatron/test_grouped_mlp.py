"""Megatron's GroupedMLP, to version 0.16: what becomes of it besides its products (see test_layers)."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lowp import get_recipe
from mindspeed_lowp.megatron_versions import HAS_GROUPED_MLP
from mindspeed_lowp.recipes.delayed import advance

from .ranks import on_ranks
from .test_layers import MOE, convert, make_model, step

pytestmark = pytest.mark.skipif(not HAS_GROUPED_MLP, reason="this version of Megatron has no GroupedMLP")


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def without_recipe():
    """Bringing its linears out changes no bit of what it computes."""
    from mindspeed_lowp.megatron.grouped_mlp import LowpGroupedMLP, bring_out_linears

    probs_first = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
    for options in ({}, {"gated_linear_unit": True, **probs_first}):
        model = make_model(**{**MOE, **options})
        loss, grads = step(model), gradients(model)
        model.zero_grad()
        experts = model.decoder.layers[0].mlp.experts
        names = list(experts.state_dict())
        bring_out_linears(experts)
        assert type(experts) is LowpGroupedMLP
        assert step(model) == loss
        assert all(torch.equal(grad, grads[name]) for name, grad in gradients(model).items())
        extra = ["linear_fc1._extra_state", "linear_fc2._extra_state"]
        assert [name for name in experts.state_dict() if name not in extra] == names


def test_experts_without_a_recipe_compute_what_they_did(tmp_path):
    on_ranks(1, without_recipe, tmp_path)


def recomputed():
    results = []
    for options in ({}, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}):
        model = make_model(**MOE, **options)
        convert(model, get_recipe("mxfp8"))
        results.append((step(model), gradients(model)))
    (loss, grads), (other_loss, other_grads) = results
    assert loss == other_loss and all(torch.equal(grad, other_grads[name]) for name, grad in grads.items())


def test_recomputing_activations_changes_no_bit(tmp_path):
    on_ranks(1, recomputed, tmp_path)


def fused_gradients():
    """Gradients go to the fp32 main_grad where accumulation is fused, to autograd elsewhere."""
    results = []
    for fused in (False, True):
        model = make_model(**MOE, gradient_accumulation_fusion=fused)
        convert(model, get_recipe("mxfp8"))
        experts = model.decoder.layers[0].mlp.experts
        for parameter in model.parameters():
            parameter.main_grad = torch.ones(parameter.shape)
            parameter.grad_added_to_main_grad = False
        step(model)
        results.append(experts)
        assert all(weight.grad_added_to_main_grad == fused for weight in experts.parameters())
    for plain, fused in zip(*(experts.parameters() for experts in results), strict=True):
        torch.testing.assert_close(fused.main_grad - 1, plain.grad.float(), rtol=2**-8, atol=1e-5)


def test_gradient_accumulation_is_fused(tmp_path):
    on_ranks(1, fused_gradients, tmp_path)


def no_tokens():
    model = make_model(**MOE)
    convert(model, get_recipe("mxfp8"))
    experts = model.decoder.layers[0].mlp.experts
    x = torch.empty(0, 64, dtype=torch.bfloat16, requires_grad=True)
    y, bias = experts(x, torch.zeros(4, dtype=torch.long), torch.empty(0))
    assert y.shape == (0, 64) and bias is None
    y.sum().backward()
    for weight in (experts.weight1, experts.weight2):
        assert weight.grad.shape == weight.shape and not weight.grad.any()


def test_experts_of_a_rank_without_tokens_get_gradients_of_zero(tmp_path):
    on_ranks(1, no_tokens, tmp_path)


def checkpoint():
    """Two linears have histories of their own, which either kind of checkpoint keeps."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    model = make_model(**MOE)
    experts = model.decoder.layers[0].mlp.experts
    keys = experts.sharded_state_dict("mlp.experts.").keys()
    recipe = get_recipe("delayed", amax_history_len=2)
    convert(model, recipe)
    step(model)
    layers = experts.linear_fc1, experts.linear_fc2
    advance([layer.recipe for layer in layers], None)
    histories = [layer.recipe.history.past for layer in layers]
    assert not torch.equal(*histories) and all(history.any() for history in histories)

    sharded = experts.sharded_state_dict("mlp.experts.")
    assert sharded.keys() == keys
    restored = {key.removeprefix("mlp.experts."): entry.data for key, entry in sharded.items()}
    for state in (experts.state_dict(), restored):
        other = make_model(**MOE)
        convert(other, recipe)
        other_experts = other.decoder.layers[0].mlp.experts
        other_experts.load_state_dict(state)
        for layer, history in zip(
            (other_experts.linear_fc1, other_experts.linear_fc2), histories, strict=True
        ):
            assert torch.equal(layer.recipe.history.past, history)

    plain = make_model(**MOE).decoder.layers[0].mlp.experts
    assert type(plain) is GroupedMLP
    experts.load_state_dict(plain.state_dict())  # which knows of no histories


def test_checkpoints_keep_the_histories_of_delayed_scaling(tmp_path):
    on_ranks(1, checkpoint, tmp_path)
