"""Fake-quantized modules: what they compute, keep and share with the float layers; conversion of models."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_lowp.qat import (
    MXFP4QATConfig,
    MXFP4QATEmbedding,
    MXFP4QATLinear,
    MXFP8Grid,
    convert_to_mxfp4_qat,
)
from tests.qat.toolkit import toolkit, toolkit_saturates


class Special(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        raise AssertionError("replaced by conversion")


def model() -> nn.Module:
    torch.manual_seed(0)
    block = nn.ModuleDict({"up": nn.Linear(40, 70), "down": Special(70, 40, bias=False)})
    layers = {
        "embed_tokens": nn.Embedding(9, 40),
        "blocks": nn.ModuleList([block]),
        "lm_head": nn.Linear(40, 9),
    }
    return nn.ModuleDict(layers)


def classes(module: nn.Module) -> dict[str, str]:
    return {n: type(m).__name__ for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}


@pytest.mark.parametrize("quantize_input", [False, True])
def test_forward_is_a_linear_of_fake_quantized_operands(quantize_input):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 40, requires_grad=True)
    layer = MXFP4QATLinear(40, 9, config=MXFP4QATConfig(quantize_input=quantize_input))
    with torch.no_grad():
        layer.weight.mul_(3)
    inputs = toolkit(x.detach()) if quantize_input else x.detach()
    y = layer(x)
    assert torch.equal(y, F.linear(inputs, toolkit(layer.weight.detach()), layer.bias))

    grad = torch.randn_like(y)
    y.backward(grad)
    assert torch.equal(layer.weight.grad, grad.flatten(0, 1).t() @ inputs.flatten(0, 1))
    torch.testing.assert_close(x.grad, grad @ toolkit(layer.weight.detach()))
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))


def test_clipping_zeroes_the_gradients_of_what_saturates():
    torch.manual_seed(0)
    x = torch.randn(20, 64, requires_grad=True)
    layer = MXFP4QATLinear(64, 33, config=MXFP4QATConfig(quantize_input=True, clip_grad=True))
    layer(x).square().sum().backward()
    assert torch.equal(x.grad == 0, toolkit_saturates(x.detach()))
    assert torch.equal(layer.weight.grad == 0, toolkit_saturates(layer.weight.detach()))
    assert (x.grad == 0).any() and (layer.weight.grad == 0).any()


def test_inputs_in_mxfp8():
    x = torch.randn(5, 70)
    layer = MXFP4QATLinear(70, 9, config=MXFP4QATConfig(quantize_input=True, input_format="mxfp8"))
    assert torch.equal(layer(x), F.linear(MXFP8Grid().project(x), toolkit(layer.weight), layer.bias))


def test_state_dict_and_parameters_are_the_float_layers():
    float_model = model()
    optimizer = torch.optim.SGD(float_model.parameters(), lr=0.1)
    before = dict(float_model.named_parameters())
    expected = {name: tensor.clone() for name, tensor in float_model.state_dict().items()}
    converted = convert_to_mxfp4_qat(float_model, MXFP4QATConfig(quantize_input=True))
    assert converted is float_model
    assert all(p is before[name] for name, p in converted.named_parameters())
    assert list(converted.state_dict()) == list(expected)
    model().load_state_dict(converted.state_dict())  # and back
    converted.load_state_dict(expected)
    # The optimizer made before goes on, on the weights in high precision.
    layer = converted["blocks"][0]["up"]
    layer(torch.randn(4, 40)).sum().backward()
    start = layer.weight.detach().clone()
    optimizer.step()
    assert torch.equal(layer.weight, start.add(layer.weight.grad, alpha=-0.1))
    assert not torch.equal(layer.weight, toolkit(layer.weight))


def test_conversion_replaces_linears_and_their_subclasses_once():
    converted = convert_to_mxfp4_qat(model())
    linears = {name: "MXFP4QATLinear" for name in ("blocks.0.up", "blocks.0.down", "lm_head")}
    assert classes(converted) == {"embed_tokens": "Embedding", **linears}
    modules = dict(converted.named_modules())
    again = convert_to_mxfp4_qat(converted, MXFP4QATConfig(quantize_input=True))
    assert dict(again.named_modules()) == modules
    assert modules["lm_head"].config == MXFP4QATConfig()
    converted["blocks"][0]["down"](torch.ones(70))
    assert modules["blocks.0.down"].bias is None


@pytest.mark.parametrize(
    ("skip_names", "skipped"),
    [
        (("lm_head", "embed_tokens"), {"embed_tokens", "lm_head"}),
        (("blocks.0",), {"blocks.0.up", "blocks.0.down"}),
        (("blocks",), {"blocks.0.up", "blocks.0.down"}),
        (("wn",), {"blocks.0.down"}),
        (("Up",), set()),
    ],
)
def test_names_that_are_skipped_and_embeddings(skip_names, skipped):
    converted = convert_to_mxfp4_qat(model(), skip_names=skip_names, embeddings=True)
    kept = {name for name, kind in classes(converted).items() if not kind.startswith("MXFP4QAT")}
    assert kept == skipped


def test_evaluation_of_an_encoder_is_fake_quantized_as_training_is():
    """PyTorch has a fused path for it, by the weights alone."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0, batch_first=True)
    x = torch.randn(3, 8, 32)
    convert_to_mxfp4_qat(encoder)
    assert classes(encoder) == {
        "self_attn.out_proj": "NonDynamicallyQuantizableLinear",
        "linear1": "MXFP4QATLinear",
        "linear2": "MXFP4QATLinear",
    }
    trained = encoder(x)
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(x), trained, rtol=1e-5, atol=1e-5)


def test_a_layer_in_two_places_stays_one():
    shared = nn.Linear(8, 8)
    converted = convert_to_mxfp4_qat(nn.ModuleList([shared, nn.Sequential(shared)]))
    assert isinstance(converted[0], MXFP4QATLinear) and converted[1][0] is converted[0]


def test_a_shared_weight_stays_shared():
    tied = model()
    tied["lm_head"].weight = tied["embed_tokens"].weight
    convert_to_mxfp4_qat(tied, embeddings=True)
    assert tied["lm_head"].weight is tied["embed_tokens"].weight


@pytest.mark.parametrize("training", [True, False])
def test_from_linear_allocates_nothing_and_keeps_the_mode_and_dtype(training):
    linear = nn.Linear(40, 9).bfloat16().train(training)
    layer = MXFP4QATLinear.from_linear(linear)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert layer.training is training and layer.config == MXFP4QATConfig()
    assert layer(torch.ones(2, 40).bfloat16()).dtype == torch.bfloat16


def test_embedding_rows_are_those_of_the_fake_quantized_table():
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 70, padding_idx=2)
    layer = MXFP4QATEmbedding.from_embedding(embedding, MXFP4QATConfig(clip_grad=True))
    assert layer.weight is embedding.weight and layer.padding_idx == 2
    tokens = torch.tensor([[1, 8, 2], [1, 1, 0]])
    rows = layer(tokens)
    assert torch.equal(rows, toolkit(embedding.weight.detach())[tokens])
    rows.sum().backward()
    counts = tokens.flatten().bincount(minlength=9).float()
    counts[2] = 0  # the padding
    expected = counts[:, None].expand(9, 70).masked_fill(toolkit_saturates(layer.weight.detach()), 0.0)
    assert torch.equal(layer.weight.grad, expected)


def test_learned_scale_factors_are_parameters_beside_the_layers_own():
    config = MXFP4QATConfig(quantize_input=True, learnable_scale_factor=True)
    converted = convert_to_mxfp4_qat(nn.Sequential(nn.Linear(64, 32)), config)
    assert set(converted.state_dict()) == {
        "0.weight",
        "0.bias",
        "0.weight_quantizer.log2_scale_factor",
        "0.input_quantizer.log2_scale_factor",
    }
    converted(torch.randn(4, 64)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in converted.parameters())
    copy.deepcopy(converted).load_state_dict(converted.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": -1}, "block_size=-1"),
        ({"scale_factor": 0}, "scale_factor=0"),
        ({"backend": "gpu"}, "backend='gpu': expected one of auto, torch, native, npu"),
        ({"scale_mode": "up"}, "scale_mode='up': expected one of round, floor, ceil"),
        (
            {"input_format": "int8", "quantize_input": True},
            "input_format='int8': expected one of mxfp4, mxfp8",
        ),
        ({"input_format": "mxfp8"}, "no effect without quantize_input"),
    ],
)
def test_unsupported_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MXFP4QATConfig(**options)


def test_what_cannot_be_converted():
    with pytest.raises(TypeError, match="the model is a Linear itself; use from_linear"):
        convert_to_mxfp4_qat(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"skip_names='lm_head' is a string; give \['lm_head'\]"):
        convert_to_mxfp4_qat(model(), skip_names="lm_head")


def test_export_holds_the_operator_and_no_more():
    converted = convert_to_mxfp4_qat(
        nn.Sequential(nn.Linear(48, 33), nn.GELU(), nn.Linear(33, 17)),
        MXFP4QATConfig(quantize_input=True, clip_grad=True),
    )
    x = torch.randn(5, 48)
    program = torch.export.export(converted, (x,))
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    quantize = "lowp.quant_dequant_mxfp4.default"
    layer = [quantize, quantize, "aten.linear.default"]
    assert calls == [*layer, "aten.gelu.default", *layer]
    assert torch.equal(program.module()(x), converted(x))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_compile_traces_forward_and_backward(backend):
    """By a back end that runs what was traced as it is: no compiler is needed, and the bits are the same."""
    config = MXFP4QATConfig(quantize_input=True, clip_grad=True, backend=backend)
    converted = convert_to_mxfp4_qat(nn.Sequential(nn.Linear(48, 33)), config)
    x = torch.randn(5, 48, requires_grad=True)
    results = []
    for run in (converted, torch.compile(converted, fullgraph=True, backend="aot_eager")):
        y = run(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, converted[0].weight])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
