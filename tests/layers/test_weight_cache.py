import copy
import gc
import io
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_lowp import lowp_grouped_linear, lowp_linear
from mindspeed_lowp.layers import (
    StaleWeightError,
    WeightCache,
    convert_model,
    drop_reused_weights,
    reuse_quantized_weights,
    reused_bytes,
)
from mindspeed_lowp.memory import saved_bytes
from mindspeed_lowp.recipes import MXFP8Recipe

from .recording import RecordingRecipe
from .test_linear import POLICIES

COUNTS = [33, 0, 31]
KINDS = ["linear", "grouped", "stacked"]


class Layer(nn.Module):
    """A linear [40, 64], or three experts of that shape, as one tensor where `kind` is "stacked"."""

    weight_cache: WeightCache | None = None

    def __init__(self, kind="linear", recipe=None, dtype=torch.bfloat16, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"linear": [(40, 64)], "grouped": [(40, 64)] * 3, "stacked": [(3, 64, 40)]}[kind]
        self.weights = nn.ParameterList(torch.randn(s, generator=generator).to(dtype) for s in shapes)
        self.kind = kind
        self.recipe = recipe or RecordingRecipe()

    def forward(self, x):
        if self.kind == "linear":
            return lowp_linear(x, self.weights[0], None, self.recipe, weight_cache=self.weight_cache)
        weights = self.weights[0] if self.kind == "stacked" else list(self.weights)
        return lowp_grouped_linear(x, weights, COUNTS, self.recipe, weight_cache=self.weight_cache)

    def counted(self):
        """How often a weight was quantized along each axis since this was last asked."""
        counts = Counter(axis for role, axes in self.recipe.log if role == "weight" for axis in axes)
        self.recipe.log.clear()
        return dict(counts)


def batches(count=3, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sum(COUNTS), 64, generator=generator).to(dtype) for _ in range(count)]


def train(layer, steps=3, optimizer=torch.optim.SGD, forward=None, **options):
    """Three micro-batches a step; every output, input gradient and weight gradient."""
    optimizer = optimizer(layer.parameters(), lr=0.5, **options)
    results, counts = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        for x in batches(dtype=layer.weights[0].dtype):
            x.requires_grad_()
            y = (forward or layer)(x)
            y.square().sum().backward()
            results += [y.detach(), x.grad]
        results += [weight.grad for weight in layer.weights]
        optimizer.step()
        counts.append(layer.counted())
    return results, counts


def equal(a, b):
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_axis_is_quantized_once_a_step_and_no_bit_differs(kind, policy, dtype):
    def layer():
        return Layer(kind, RecordingRecipe(**POLICIES[policy]), dtype)

    plain, counts = train(layer())
    weights = len(layer().weights)
    assert counts == [{-1: 3 * weights, -2: 3 * weights}] * 3
    reusing = layer()
    assert reuse_quantized_weights(reusing) == 1
    again, counts = train(reusing)
    assert counts == [{-1: weights, -2: weights}] * 3
    assert equal(plain, again)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("way", ["foreach", "fused", "neither"])
def test_every_way_of_an_optimizer_to_write_is_noticed(optimizer, way):
    """Fused ones leave the version counter as it is."""
    options = {} if way == "neither" else {way: True}
    plain, _ = train(Layer(), optimizer=optimizer, **options)
    reusing = Layer()
    reuse_quantized_weights(reusing, check=True)
    assert equal(plain, train(reusing, optimizer=optimizer, **options)[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation(kind, reentrant, policy):
    plain, _ = train(Layer(kind))
    reusing = Layer(kind, RecordingRecipe(**POLICIES[policy]))
    reuse_quantized_weights(reusing)
    again, counts = train(reusing, forward=lambda x: checkpoint(reusing, x, use_reentrant=reentrant))
    weights = len(reusing.weights)
    assert counts == [{-1: weights, -2: weights}] * 3
    assert equal(plain, again)


def test_evaluation_shares_the_forward_axis_with_training():
    layer = Layer()
    reuse_quantized_weights(layer)
    x = batches(1)[0].requires_grad_()
    with torch.no_grad():
        evaluated = layer(x)
        layer(x)
    assert layer.counted() == {-1: 1}
    y = layer(x)
    assert layer.counted() == {-2: 1} and torch.equal(y, evaluated)


def test_inference_mode_leaves_nothing_behind():
    layer = Layer(recipe=RecordingRecipe(defer_backward_quant=True))
    reuse_quantized_weights(layer)
    x = batches(1)[0].requires_grad_()
    with torch.inference_mode():
        layer(x)
        layer(x)
    assert layer.counted() == {-1: 2} and reused_bytes(layer) == 0
    layer(x).sum().backward()
    assert layer.counted() == {-1: 1, -2: 1}


def test_frozen_weight():
    layer = Layer()
    layer.requires_grad_(False)
    reuse_quantized_weights(layer)
    for x in batches():
        layer(x.requires_grad_()).sum().backward()
    assert layer.counted() == {-1: 1, -2: 1}


def write_in_place(layer):
    with torch.no_grad():
        layer.weights[0].mul_(-1)


def load(layer, **options):
    layer.load_state_dict({name: -p for name, p in layer.state_dict().items()}, **options)


def set_data(layer):
    layer.weights[0].data = -layer.weights[0].data


def replace(layer):
    layer.weights[0] = nn.Parameter(-layer.weights[0].data)


def replace_by_a_view(layer):
    layer.weights[0] = nn.Parameter(layer.weights[0].data.mul_(-1))


@pytest.mark.parametrize(
    "change",
    [
        write_in_place,
        load,
        lambda layer: load(layer, assign=True),
        set_data,
        replace,
        replace_by_a_view,
        lambda layer: setattr(layer, "recipe", RecordingRecipe(fp8_format="hybrid")),
    ],
    ids=["in-place", "load", "load-assign", "set-data", "replace", "replace-by-a-view", "recipe"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_changes_that_are_seen(kind, change):
    layer = Layer(kind)
    reuse_quantized_weights(layer)
    x = batches(1)[0]
    layer(x)
    layer.counted()
    change(layer)
    y = layer(x)
    assert sum(layer.counted().values()) == len(layer.weights)
    layer.weight_cache = None
    assert torch.equal(y, layer(x))


def test_memory_that_comes_back_is_not_taken_for_the_same():
    """As where it is freed and given to the next tensor: the same address and version, other values."""
    layer = Layer()
    weight = layer.weights[0]
    memory = bytearray(2 * weight.numel())
    values = [torch.frombuffer(memory, dtype=torch.bfloat16).view_as(weight) for _ in range(2)]
    weight.data = values[0].copy_(weight)
    reuse_quantized_weights(layer)
    x = batches(1)[0]
    before = layer(x)
    weight.data = values[1].mul_(-1)
    assert torch.equal(layer(x), -before)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unseen_write_is_stale_until_it_is_told(kind):
    layer = Layer(kind)
    reuse_quantized_weights(layer)
    x = batches(1)[0]
    before = layer(x)
    layer.weights[-1].data.mul_(-1)
    assert torch.equal(layer(x), before)
    drop_reused_weights([Layer().weights[0]])  # somebody else's
    assert torch.equal(layer(x), before)
    drop_reused_weights([layer.weights[-1]])
    assert not torch.equal(layer(x), before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_check_stops_at_a_stale_weight_and_names_the_layer(kind, policy):
    model = nn.Sequential(nn.ReLU(), Layer(kind, MXFP8Recipe(**POLICIES[policy])))
    reuse_quantized_weights(model, check=True)
    x = batches(1)[0].requires_grad_()
    model(x).sum().backward()
    model(x).sum().backward()
    model[1].weights[-1].data.view(-1)[5] = 100
    with pytest.raises(StaleWeightError, match=r"^1: the weight is no longer what was quantized.*\.data"):
        model(x)


def test_a_deferred_weight_changed_before_backward_is_refused():
    layer = Layer(recipe=RecordingRecipe(defer_backward_quant=True))
    reuse_quantized_weights(layer)
    y = layer(batches(1)[0].requires_grad_())
    write_in_place(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "same-shape"])
def test_models_never_share(how):
    one = Layer()
    reuse_quantized_weights(one, check=True)
    x = batches(1)[0]
    one(x)
    if how == "deepcopy":
        two = copy.deepcopy(one)
    elif how == "pickle":
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        two = torch.load(file, weights_only=False)
    else:
        two = Layer()
        reuse_quantized_weights(two, check=True)
    assert two.weight_cache is not one.weight_cache and two.weight_cache.check
    assert reused_bytes(two) == 0 < reused_bytes(one)
    two.weights[0].data.mul_(-1)  # equal versions, told to nobody
    assert torch.equal(two(x), -one(x))


def test_a_deleted_model_frees_what_was_quantized():
    layer = Layer()
    reuse_quantized_weights(layer)
    layer(batches(1)[0])
    cache, parameter = weakref.ref(layer.weight_cache), weakref.ref(layer.weights[0])
    (operand,) = layer.weight_cache._operands.values()
    codes = weakref.ref(operand.data)
    del layer, operand
    gc.collect()
    assert cache() is parameter() is codes() is None


def test_the_cache_does_not_keep_a_weight_alive():
    layer = Layer()
    reuse_quantized_weights(layer)
    layer(batches(1)[0])
    parameter = weakref.ref(layer.weights[0])
    replace(layer)
    gc.collect()
    assert parameter() is None


def test_bytes_held_are_reported():
    """Of one weight [40, 64]: codes, and a scale for each 32 of them, in pairs."""
    layer = Layer(recipe=RecordingRecipe(defer_backward_quant=True))
    reuse_quantized_weights(layer)
    x = batches(1)[0].requires_grad_()
    axis_1, axis_2 = 40 * 64 + 40 * 2, 40 * 64 + 64 * 2
    y = layer(x)
    assert reused_bytes(layer) == axis_1
    deferred = saved_bytes(y, layer.parameters())
    y.sum().backward()
    assert reused_bytes(layer) == axis_1 + axis_2
    # What backward will use is seen to be kept for it, deferred or not.
    assert saved_bytes(layer(x), layer.parameters()) == deferred + axis_2
    drop_reused_weights()
    assert reused_bytes(layer) == 0


def test_one_copy_for_both_axes_is_quantized_once():
    class OneCopy(RecordingRecipe):
        def one_copy_serves_both_axes(self, role):
            return True

    layer = Layer(recipe=OneCopy())
    reuse_quantized_weights(layer)
    x = batches(1)[0].requires_grad_()
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    assert [axes for role, axes in layer.recipe.log if role == "weight"] == [(-1, -2)]


def test_a_converted_model_of_plain_linears():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 40)).bfloat16()
    recipe = RecordingRecipe()
    convert_model(model, recipe)
    assert reuse_quantized_weights(model) == 2
    for x in batches():
        model(x.requires_grad_()).sum().backward()
    assert [axes for role, axes in recipe.log if role == "weight"] == [(-1, -2)] * 2  # of two layers


def test_a_compiled_model_reuses_too():
    def train(model, forward):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        results = []
        for _ in range(2):
            optimizer.zero_grad()
            for x in batches(2):
                y = forward(x)
                y.square().sum().backward()
                results.append(y.detach())
            optimizer.step()
        return [*results, *(parameter.detach() for parameter in model.parameters())]

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 40)).bfloat16()

    plain, reusing, recipe = model(), model(), RecordingRecipe()
    convert_model(plain, MXFP8Recipe())
    convert_model(reusing, recipe)
    reuse_quantized_weights(reusing)
    compiled = torch.compile(reusing, backend="aot_eager")
    assert equal(train(plain, plain), train(reusing, compiled))
    assert [axes for role, axes in recipe.log if role == "weight"] == [(-1,), (-1, -2)] * 2


def test_a_layer_that_cannot_reuse_is_named():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].recipe = MXFP8Recipe()
    with pytest.raises(TypeError, match="0: a Linear cannot reuse its quantized weight"):
        reuse_quantized_weights(model)
