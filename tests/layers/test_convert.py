"""Any model's linears get a recipe in place, and are the same objects in all else."""

import copy
import enum
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_lowp import (
    MoETrainingConfig,
    MXLinear,
    MXLinearConfig,
    convert_model,
    get_recipe,
    grouped_quantize_,
    linear_quantize_,
    lowp_grouped_linear,
    lowp_linear,
)
from mindspeed_lowp.layers import ConversionError, register_layer
from mindspeed_lowp.layers.convert import Choice

RECIPE = get_recipe("mxfp8")


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Grouped experts as torchtitan has them, weights [E, K, N], with the attribute of a converted layer."""

    recipe = None

    def __init__(self, experts, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width, width) / width**0.5)

    def forward(self, x, counts):
        if self.recipe is None:
            return torch.cat([part @ w for part, w in zip(x.split(counts), self.weight, strict=True)])
        return lowp_grouped_linear(x, self.weight, counts, self.recipe)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(x)


class CausalLM(nn.Module):
    """In HuggingFace's manner: model.layers.0.self_attn.q_proj, and a head tied to the embedding."""

    def __init__(self, vocabulary=50, width=32, layers=2):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocabulary, width)
        self.model.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(x)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.fixture
def grouped_layer():
    """`Experts`, known to the conversion for one test."""
    from mindspeed_lowp.layers import convert

    register_layer(Experts, grouped=True)
    yield Experts
    del convert._CONVERTED[Experts]
    convert._GROUPED.remove(Experts)


def mlp(dtype=torch.bfloat16):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(dtype)


def test_a_linear_computes_as_lowp_linear_does():
    model = mlp()
    x = torch.randn(5, 32).bfloat16()
    first, last = model[0], model[2]
    expected = F.gelu(lowp_linear(x, first.weight, first.bias, RECIPE))
    expected = lowp_linear(expected, last.weight, last.bias, RECIPE)
    report = convert_model(model, RECIPE)
    assert (report.linears, report.kept) == (["0", "2"], [])
    assert torch.equal(model(x), expected)


def test_a_causal_model_trains_and_keeps_what_is_filtered():
    torch.manual_seed(0)
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # before the conversion
    report = convert_model(model, RECIPE, filter_fqns=["lm_head", "layers.0.mlp"])
    assert report.kept == ["model.layers.0.mlp.0", "model.layers.0.mlp.2", "lm_head"]
    assert len(report.linears) == 4 + 4 + 2
    converted = [name for name, module in model.named_modules() if isinstance(module, MXLinear)]
    assert converted == report.linears
    tokens = torch.randint(50, (4, 16))
    losses = []
    for _ in range(30):
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_parameters_hooks_keys_and_modules_stay():
    model = mlp()
    calls = []
    model[0].register_forward_hook(lambda module, inputs, output: calls.append("forward"))
    model[0].weight.register_hook(lambda grad: calls.append("gradient"))
    model[0].note = "kept"
    modules, parameters, keys = list(model), dict(model.named_parameters()), list(model.state_dict())
    convert_model(model, RECIPE)
    assert all(new is old for new, old in zip(model, modules, strict=True))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == keys and model[0].note == "kept"
    model(torch.randn(3, 32).bfloat16()).sum().backward()
    assert calls == ["forward", "gradient"]


def test_converting_twice_is_converting_once_and_a_new_recipe_replaces_the_old():
    model = mlp()
    convert_model(model, RECIPE)
    first = model[0].recipe
    again = convert_model(model, get_recipe("mxfp8"))
    assert again.linears == ["0", "2"] and type(model[0]) is MXLinear and model[0].recipe is first
    convert_model(model, get_recipe("mxfp8", fp8_format="hybrid"))
    assert model[0].recipe.fp8_format == "hybrid"


def test_a_model_that_is_itself_a_linear():
    layer = nn.Linear(32, 32)
    convert_model(layer, RECIPE)
    assert type(layer) is MXLinear and "MXFP8Recipe(fp8_format='e4m3'" in repr(layer)


def test_without_a_recipe_it_is_a_linear():
    layer = MXLinear(32, 16)
    x = torch.randn(4, 32)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


class OwnForward(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def test_linears_with_a_forward_of_their_own_stay():
    wrapped = nn.Linear(32, 32)
    wrapped.forward = lambda x: F.linear(x, wrapped.weight)  # as accelerate does
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    model = nn.ModuleDict(
        {
            "own": OwnForward(32, 32),
            "wrapped": wrapped,
            "parametrized": parametrized,
            "lazy": nn.LazyLinear(32),
            "attention": nn.MultiheadAttention(32, 2),
            "plain": nn.Linear(32, 32),
        }
    )
    report = convert_model(model, RECIPE)
    assert report.linears == ["plain"]
    assert report.kept == ["own", "wrapped", "parametrized", "lazy", "attention.out_proj"]
    assert type(model["own"]) is OwnForward


def outputs(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.float().square().sum(), x)
    return y.detach(), grad


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_copies_and_pickles_keep_the_recipe():
    model = mlp()
    convert_model(model, RECIPE, filter_fqns=["2"])
    x = torch.randn(6, 32).bfloat16()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert type(other[0]) is MXLinear and other[0].weight is not model[0].weight
        assert_same(outputs(other, x), outputs(model, x))


def test_a_model_without_storage_keeps_the_recipe():
    with torch.device("meta"):
        model = mlp()
    convert_model(model, RECIPE)
    model.to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict(), assign=True)
    expected = mlp()
    convert_model(expected, RECIPE)
    x = torch.randn(6, 32).bfloat16()
    assert_same(outputs(model, x), outputs(expected, x))


def test_a_compiled_model_is_the_same_to_the_last_bit():
    model = mlp()
    convert_model(model, RECIPE)
    x = torch.randn(6, 32).bfloat16()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(outputs(compiled, x), outputs(model, x))


def test_a_model_compiled_before_follows_its_conversion():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(6, 32).bfloat16()
    before = outputs(compiled, x)
    convert_model(model, RECIPE)
    after = outputs(compiled, x)
    assert not torch.equal(before[0], after[0])
    assert_same(after, outputs(model, x))


def test_under_autocast_the_weights_are_quantized_from_their_own_precision():
    model = mlp(torch.float32)
    convert_model(model, RECIPE)
    x = torch.randn(6, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y = model[0](x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, lowp_linear(x.bfloat16(), model[0].weight, model[0].bias, RECIPE))


@pytest.mark.parametrize("argument", ["filter_fqns", "fqns"])
def test_a_name_in_no_layer_is_told_and_the_model_left(argument, grouped_layer):
    model = CausalLM()
    model.experts = Experts(2, 32)
    with pytest.raises(ConversionError) as info:
        convert_model(model, RECIPE, **{argument: ["self_atn", "expertz"]})
    message, kind = str(info.value), "expert" if argument == "fqns" else "layer"
    assert message.startswith(f"convert_model: {argument}: 'self_atn' is in no {kind}'s name; the nearest: ")
    assert f"'expertz' is in no {kind}'s name; the nearest: experts" in message
    assert argument == "fqns" or "the nearest: self_attn" in message
    assert not any(isinstance(module, MXLinear) for module in model.modules())


def test_a_model_without_experts_says_so():
    with pytest.raises(ConversionError, match="'experts' is in no expert's name; the model has no experts"):
        convert_model(CausalLM(), RECIPE, fqns=["experts"])


def test_case_matters_and_the_whole_name_counts():
    model = CausalLM()
    with pytest.raises(ConversionError, match="'LM_HEAD' is in no layer's name"):
        convert_model(model, RECIPE, filter_fqns=["LM_HEAD"])
    report = convert_model(model, RECIPE, filter_fqns=["layers.1.self_attn.k_"])
    assert report.kept == ["model.layers.1.self_attn.k_proj"]


@pytest.mark.parametrize(
    ("model", "filters", "why"),
    [
        (nn.Sequential(nn.ReLU()), [], "there is no linear in it"),
        (nn.Sequential(nn.Linear(2, 2)), ["0"], "all are kept in high precision"),
    ],
)
def test_nothing_to_convert_is_an_error(model, filters, why):
    with pytest.raises(ConversionError, match=f"no layer of the model was converted: {why}"):
        convert_model(model, RECIPE, filters)


@pytest.mark.parametrize("wrong", ["mxfp8", MXLinearConfig(), type(RECIPE), None], ids=repr)
@pytest.mark.parametrize("function", ["lowp_linear", "lowp_grouped_linear", "convert_model"])
def test_what_is_no_recipe_is_told_how_to_get_one(function, wrong):
    x, weight, model = torch.randn(4, 32), torch.randn(8, 32), mlp()
    calls = {
        "lowp_linear": lambda: lowp_linear(x, weight, None, wrong),
        "lowp_grouped_linear": lambda: lowp_grouped_linear(x, [weight], [4], wrong),
        "convert_model": lambda: convert_model(model, wrong),
    }
    message = rf"^{function}: recipe=.* is not a recipe; give get_recipe\('mxfp8'\)$"
    with pytest.raises(TypeError, match=message):
        calls[function]()
    assert type(model[0]) is nn.Linear


def test_what_is_no_model_or_no_list_is_told():
    with pytest.raises(TypeError, match=r"model is a list; give an nn\.Module"):
        convert_model([mlp()], RECIPE)
    with pytest.raises(TypeError, match=r"filter_fqns=None; give a list of parts of layers' names"):
        convert_model(mlp(), RECIPE, None)


def test_the_nearest_names_are_told_however_far():
    with pytest.raises(ConversionError) as info:
        convert_model(CausalLM(), RECIPE, filter_fqns=["foo"])
    message = str(info.value)
    assert message.startswith("convert_model: filter_fqns: 'foo' is in no layer's name; the nearest: ")
    assert len(message.split(": ")[-1].split(", ")) == 3


def test_two_recipes_in_one_model_by_two_calls():
    model = mlp()
    convert_model(model, RECIPE, filter_fqns=["2"])
    report = convert_model(model, get_recipe("hif8"), filter_fqns=["0"])
    assert (report.linears, report.kept) == (["2"], ["0"])
    assert [model[0].recipe.name, model[2].recipe.name] == ["mxfp8", "hif8"]


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def quantize_all(model):
    linear_quantize_(model, MXLinearConfig())


def convert_the_last(model):
    convert_model(model, RECIPE, filter_fqns=["layers.0"])


@pytest.mark.parametrize("convert", [quantize_all, convert_the_last])
@pytest.mark.parametrize("padded", [False, True])
def test_evaluation_of_an_encoder_multiplies_as_training_does(encoder, convert, padded):
    """PyTorch has a fused path for it, by the weights alone."""
    x = torch.randn(3, 8, 32)
    mask = torch.arange(8) >= torch.tensor([[8], [5], [2]]) if padded else None
    convert(encoder)
    trained = encoder(x, src_key_padding_mask=mask)
    encoder.eval()
    with torch.no_grad():
        evaluated = encoder(x, src_key_padding_mask=mask)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=1e-5)


def test_an_encoder_without_a_recipe_keeps_its_fused_path(encoder):
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(32, 8)})
    convert_model(model, RECIPE, filter_fqns=["encoder"])
    assert encoder.use_nested_tensor and encoder.layers[0].activation_relu_or_gelu == 1


def test_a_string_is_no_list_of_names():
    with pytest.raises(TypeError, match=r"filter_fqns='lm_head' is a string; give a list: \['lm_head'\]"):
        convert_model(CausalLM(), RECIPE, "lm_head")


def test_experts_are_chosen_by_their_own_names(grouped_layer):
    model = nn.ModuleDict(
        {"linear": nn.Linear(32, 32), "experts": Experts(2, 32), "shared_experts": Experts(2, 32)}
    )
    report = convert_model(model, RECIPE, fqns=["shared"])
    assert (report.linears, report.grouped) == (["linear"], ["shared_experts"])
    assert (report.kept, report.experts) == (["experts"], ["experts", "shared_experts"])
    x = torch.randn(9, 32)
    grouped = model["shared_experts"]
    assert torch.equal(grouped(x, [4, 5]), lowp_grouped_linear(x, grouped.weight, [4, 5], RECIPE))
    filtered = convert_model(model, RECIPE, filter_fqns=["shared"])
    assert filtered.grouped == ["experts"]


@pytest.mark.parametrize("choice", [Choice(None), Choice(RECIPE, fqns=["a."]), Choice(RECIPE, (), ["b"])])
def test_what_is_not_chosen_has_no_recipe(choice):
    assert choice.recipe_for("layers.b") is None


class TitanRecipe(enum.Enum):
    MXFP8 = "mxfp8"


@pytest.mark.parametrize("config", [MXLinearConfig, MoETrainingConfig])
@pytest.mark.parametrize("name", ["mxfp8", TitanRecipe.MXFP8])
def test_a_config_comes_from_a_recipes_name(config, name):
    assert config.from_recipe_name(name) == config(recipe_name="mxfp8") == config()
    with pytest.raises(ValueError, match="unknown recipe 'mxfp9'"):
        config.from_recipe_name("mxfp9")


def test_linears_and_experts_are_quantized_by_configs(grouped_layer):
    model = CausalLM()
    model.experts = Experts(2, 32)
    linears = linear_quantize_(
        model, MXLinearConfig(), lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name
    )
    assert linears.kept == ["lm_head"] and len(linears.linears) == 12 and model.experts.recipe is None
    assert grouped_quantize_(model, MoETrainingConfig()).grouped == ["experts"]
    assert model.experts.recipe == RECIPE
    with pytest.raises(ConversionError):
        grouped_quantize_(model, MoETrainingConfig(), lambda module, name: False)


def test_the_two_configs_are_not_mistaken_for_each_other():
    with pytest.raises(TypeError, match=r"linear_quantize_: config is a MoETrainingConfig; give MXLinearCon"):
        linear_quantize_(mlp(), MoETrainingConfig())
    with pytest.raises(TypeError, match="grouped_quantize_: config is a MXLinearConfig"):
        grouped_quantize_(mlp(), MXLinearConfig())
