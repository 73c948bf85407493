"""The modules under Transformer Engine's names: their constructors, states, and arithmetic."""

import ast
import inspect
import io
import math
from pathlib import Path

import megatron.core.extensions
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from mindspeed_lowp.megatron.te_attention import TEDotProductAttention
from mindspeed_lowp.megatron.te_linear import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelLinear,
)
from mindspeed_lowp.megatron.te_norm import TENorm
from mindspeed_lowp.recipes import get_recipe, recipe_names

from ..layers.recording import RecordingRecipe

ALL = [
    TELinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
    TENorm,
    TEDotProductAttention,
]
LINEARS = {
    TELinear: {"parallel_mode": "duplicated", "skip_weight_param_allocation": False},
    TEColumnParallelLinear: {"gather_output": False, "is_expert": False},
    TELayerNormColumnParallelLinear: {"gather_output": False, "is_expert": False},
    TERowParallelLinear: {"input_is_parallel": True, "is_expert": False},
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    dist.init_process_group(
        "gloo", f"file://{tmp_path_factory.mktemp('gloo') / 'store'}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def make_config(**options):
    return TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "use_cpu_initialization": True,
            "params_dtype": torch.bfloat16,
            **options,
        }
    )


def make_linear(kind, config=None, **options):
    torch.manual_seed(1)
    options = {"bias": True, "skip_bias_add": False, **LINEARS[kind], **options}
    return kind(64, 96, config=config or make_config(), init_method=torch.nn.init.normal_, **options)


def make_input():
    torch.manual_seed(2)
    return torch.randn(8, 2, 64, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("module", ALL)
def test_constructors_are_those_of_megatrons_wrappers(module):
    """Without Transformer Engine the wrappers are mocks, so their source is read."""
    [folder] = megatron.core.extensions.__path__
    source = ast.parse(Path(folder, "transformer_engine.py").read_text())
    [wrapper] = [n for n in ast.walk(source) if isinstance(n, ast.ClassDef) and n.name == module.__name__]
    [init] = [n for n in wrapper.body if getattr(n, "name", "") in ("__init__", "__new__")]
    defaults = [None] * (len(init.args.args) - len(init.args.defaults)) + init.args.defaults
    expected = {
        argument.arg: default if default is None else ast.literal_eval(default)
        for argument, default in [
            *zip(init.args.args[1:], defaults[1:], strict=True),
            *zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True),
        ]
    }
    ours = inspect.signature(module).parameters
    assert list(ours) == list(expected)
    for name, parameter in ours.items():
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default == expected[name] or expected[name] is None, name
    assert [p.kind for p in ours.values()].count(inspect.Parameter.KEYWORD_ONLY) == len(init.args.kwonlyargs)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("bias", [True, False])
def test_state_and_extra_state_of_a_transformer_engine_checkpoint(kind, bias):
    linear = make_linear(kind, bias=bias)
    norm = {"layer_norm_weight", "layer_norm_bias"} if kind is TELayerNormColumnParallelLinear else set()
    assert linear.state_dict().keys() == {"weight", "_extra_state"} | ({"bias"} if bias else set()) | norm
    for extra_state in (io.BytesIO(b"amax history"), torch.zeros(7, dtype=torch.uint8), None):
        state = {k: v + 1 for k, v in linear.state_dict().items() if k != "_extra_state"}
        linear.load_state_dict({**state, "_extra_state": extra_state})
        assert torch.equal(linear.weight, state["weight"])
    linear.load_state_dict(state)  # and of one without


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_state(normalization):
    norm = TENorm(make_config(normalization=normalization), 64, eps=1e-5, has_residual=True)
    assert norm.state_dict().keys() == {"weight"} | ({"bias"} if normalization == "LayerNorm" else set())
    norm.load_state_dict({**norm.state_dict(), "_extra_state": io.BytesIO()})


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_bf16_products_are_those_of_torch(kind, skip_bias_add):
    linear, x = make_linear(kind, skip_bias_add=skip_bias_add), make_input()
    with torch.no_grad():
        linear.bias.normal_()
    y, bias = linear(x)
    normed = x
    if kind is TELayerNormColumnParallelLinear:
        normed = F.layer_norm(x, (64,), linear.layer_norm_weight, linear.layer_norm_bias, 1e-5)
    assert (bias is linear.bias) if skip_bias_add else (bias is None)
    expected = F.linear(normed, linear.weight)
    torch.testing.assert_close(y, expected if skip_bias_add else expected + linear.bias)
    y.sum().backward()
    assert all(p.grad is not None for p in linear.parameters() if p is not linear.bias or not skip_bias_add)


@pytest.mark.parametrize("kind", LINEARS)
def test_a_recipe_quantizes_all_three_products(kind):
    linear, x = make_linear(kind), make_input()
    plain = linear(x)[0]
    linear.recipe = RecordingRecipe()
    y = linear(x)[0]
    assert not torch.equal(y, plain)
    torch.testing.assert_close(y, plain, rtol=0.1, atol=3.0)
    y.sum().backward()
    assert linear.recipe.log == [("input", (-1, -2)), ("weight", (-1, -2)), ("grad", (-1, -2))]


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_multiplies(kind, name):
    linear, x = make_linear(kind), make_input()
    plain = linear(x)[0]
    linear.recipe = get_recipe(name).for_layer()
    y = linear(x)[0]
    assert not torch.equal(y, plain)
    torch.testing.assert_close(y, plain, rtol=0.1, atol=3.0)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in linear.parameters())


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centered_gamma_keeps_what_bf16_would_round_away(normalization):
    config = make_config(normalization=normalization, layernorm_zero_centered_gamma=True)
    norm = TENorm(config, 64)
    assert not norm.weight.any()
    with torch.no_grad():
        norm.weight.fill_(2.0**-9)  # 1 + 2^-9 is not a bf16 number
    x = make_input()
    double = x.double()
    if normalization == "LayerNorm":
        double = double - double.mean(-1, keepdim=True)
    expected = double / (double.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + 2.0**-9)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    # Half a bf16 unit, and what little fp32 adds.
    assert ((y.double() - expected).abs() <= 2.0**-8 * expected.abs() * 1.01 + 1e-6).all()
    norm.weight.grad = None
    y.sum().backward()
    assert norm.weight.grad.dtype == torch.bfloat16


def test_fused_norm_is_the_norm_before_the_linear():
    config = make_config(normalization="RMSNorm", layernorm_zero_centered_gamma=True)
    fused = make_linear(TELayerNormColumnParallelLinear, config)
    norm, linear = TENorm(config, 64), make_linear(TEColumnParallelLinear, config)
    with torch.no_grad():
        fused.layer_norm_weight.normal_()
        norm.weight.copy_(fused.layer_norm_weight)
    assert torch.equal(linear.weight, fused.weight)
    assert torch.equal(fused(make_input())[0], linear(norm(make_input()))[0])


def test_sequence_parallelism_marks_what_is_replicated():
    config = make_config(sequence_parallel=True, tensor_model_parallel_size=2)
    fused = make_linear(TELayerNormColumnParallelLinear, config)
    assert fused.layer_norm_weight.sequence_parallel and fused.layer_norm_bias.sequence_parallel
    duplicated = make_linear(TELinear, config)
    assert duplicated.weight.sequence_parallel and duplicated.bias.sequence_parallel
    assert TENorm(config, 64).weight.sequence_parallel


def test_deferred_embedding_gradients_leave_the_layers_alone():
    config = make_config()
    config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, 1
    linear = make_linear(TEColumnParallelLinear, config)
    linear(make_input())[0].sum().backward()
    assert linear.weight.grad is not None and config.defer_embedding_wgrad_compute


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (TELinear, {"parallel_mode": "column"}, "TEColumnParallelLinear"),
        (TELinear, {"tp_group": object()}, "tp_group"),
        (TELinear, {"skip_weight_param_allocation": True}, "skip_weight_param_allocation"),
        (TELinear, {"symmetric_ar_type": "two_shot"}, "symmetric_ar_type"),
        (TEColumnParallelLinear, {"gather_output": True}, "gather_output"),
        (TERowParallelLinear, {"input_is_parallel": False}, "input_is_parallel"),
        (TELayerNormColumnParallelLinear, {"is_expert": True}, "expert"),
    ],
)
def test_options_that_the_linears_do_not_have(kind, options, named):
    with pytest.raises(ValueError, match=named):
        make_linear(kind, **options)


@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("flag", ["tp_comm_overlap"])
def test_linears_name_the_flag_that_they_cannot_honour(kind, flag):
    config = make_config()
    setattr(config, flag, True)
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}"):
        make_linear(kind, config)


def make_attention(config, **options):
    return TEDotProductAttention(config, 1, AttnMaskType.causal, "self", **options)


@pytest.mark.parametrize(
    ("attribute", "value", "flag"),
    [
        ("context_parallel_size", 2, "--context-parallel-size 2"),
        ("qk_clip", True, "--qk-clip"),
        ("log_max_attention_logit", True, "--log-max-attention-logit"),
    ],
)
def test_attention_names_the_flag_that_it_cannot_honour(attribute, value, flag):
    config = make_config()
    setattr(config, attribute, value)
    with pytest.raises(ValueError, match=flag):
        make_attention(config)


def test_attention_refuses_packed_sequences_and_biased_scores():
    attention = make_attention(make_config(), k_channels=24, v_channels=8)
    assert attention.hidden_size_per_partition == 32 and attention.softmax_scale == 1 / math.sqrt(24)
    attention.load_state_dict({"_extra_state": io.BytesIO()})
    q = k = v = torch.zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match="--sft"):
        attention(q, k, v, None, packed_seq_params=PackedSeqParams())
    with pytest.raises(ValueError, match="--position-embedding-type relative"):
        attention(q, k, v, None, attention_bias=torch.zeros(1))
