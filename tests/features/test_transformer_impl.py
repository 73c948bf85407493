"""Which modules `--transformer-impl transformer_engine` brings, and the flags that stop beside it."""

import pytest
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from mindspeed_lowp.features.transformer_impl import _NEEDS_KERNELS
from mindspeed_lowp.megatron.grouped_linear import TEColumnParallelGroupedLinear
from mindspeed_lowp.megatron.te_attention import TEDotProductAttention
from mindspeed_lowp.megatron.te_linear import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelLinear,
)
from mindspeed_lowp.megatron.te_norm import TENorm

from .conftest import MODEL

TE = "--bf16 --transformer-impl transformer_engine"
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8"


@pytest.fixture
def with_transformer_engine(monkeypatch):
    name = "mindspeed_lowp.features.transformer_impl.has_transformer_engine"
    monkeypatch.setattr(name, lambda: True)


@pytest.mark.parametrize("recipe", ["", MXFP8])
def test_a_dense_layer_is_built_of_our_modules(parse, recipe):
    parse(f"{TE} {recipe}")
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True).submodules
    attention = layer.self_attention.submodules
    assert attention.linear_qkv is TELayerNormColumnParallelLinear
    assert attention.core_attention is TEDotProductAttention
    assert attention.linear_proj is TERowParallelLinear
    assert attention.q_layernorm is attention.k_layernorm is TENorm
    assert layer.mlp.submodules.linear_fc1 is TELayerNormColumnParallelLinear
    assert layer.mlp.submodules.linear_fc2 is TERowParallelLinear


def test_they_are_the_default(monkeypatch, parse):
    monkeypatch.setattr("tests.features.conftest.MODEL", MODEL[2:])
    assert parse("--bf16").transformer_impl == "transformer_engine"
    assert transformer_engine.TELinear is TELinear


@pytest.mark.parametrize("grouped", [True, False])
def test_experts(parse, grouped):
    parse(f"{TE} --num-experts 4 --disable-bias-linear {'--moe-grouped-gemm' if grouped else ''}")
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=4, moe_grouped_gemm=grouped
    )
    moe = layer.submodules.mlp.submodules
    assert moe.experts.func is (TEGroupedMLP if grouped else SequentialMLP)
    column = moe.experts.keywords["submodules"].linear_fc1
    assert column is (TEColumnParallelGroupedLinear if grouped else TEColumnParallelLinear)
    assert moe.shared_experts.keywords["submodules"].linear_fc1 is TEColumnParallelLinear


def test_multi_latent_attention(parse):
    parse(TE)
    layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        multi_latent_attention=True, qk_layernorm=True
    )
    attention = layer.submodules.self_attention.submodules
    assert attention.linear_q_down_proj is attention.linear_kv_down_proj is TELinear
    assert multi_latent_attention.TELinear is TELinear  # asked about the one above
    assert attention.linear_q_up_proj is TELayerNormColumnParallelLinear


def test_megatron_is_left_as_it_was_found(parse):
    from mindspeed_lowp.hosts import bare_megatron

    mock = transformer_engine.TELinear
    parse(TE)
    assert transformer_engine.TELinear is TELinear
    bare_megatron.unregister()
    assert transformer_engine.TELinear is mock and gpt_layer_specs.TESpecProvider is None


@pytest.mark.parametrize(
    "flag",
    [
        "--tp-comm-overlap",
        "--cpu-offloading-num-layers 1",
        "--fine-grained-activation-offloading",
        "--qk-clip",
        "--symmetric-ar-type two_shot",
        "--cross-entropy-fusion-impl te",
        "--cuda-graph-impl transformer_engine",
        "--attention-backend flash",
        "--use-te-activation-func",
        "--moe-permute-fusion",
        "--fused-residual-rmsnorm",
        "--te-precision-config-file file",
        "--sft",
    ],
)
def test_flags_that_need_transformer_engines_kernels(stops, flag):
    assert stops(f"{TE} {flag}").startswith(f"error: {flag} needs the kernels of Transformer Engine")


def test_context_parallelism_stops(monkeypatch, stops):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = stops(f"{TE} --context-parallel-size 2")
    assert message.startswith("error: --context-parallel-size 2 needs the kernels of Transformer Engine")


def test_flags_with_values_that_need_no_kernels(parse):
    parse(
        f"{TE} --attention-backend unfused --context-parallel-size 1 --cuda-graph-impl none "
        "--cpu-offloading-num-layers 0 --cross-entropy-fusion-impl native"
    )


def test_every_argument_that_is_asked_about_exists(parse):
    assert not [name for name in _NEEDS_KERNELS if not hasattr(parse(TE), name)]


def test_inference_layers_stop(stops):
    message = stops("--bf16 --transformer-impl inference_optimized")
    assert message.startswith("error: --transformer-impl inference_optimized needs Transformer Engine")
    assert "set --transformer-impl transformer_engine" in message


def test_the_real_transformer_engine_keeps_its_modules(with_transformer_engine, parse):
    mock = transformer_engine.TELinear
    parse(TE)
    assert transformer_engine.TELinear is mock is not TELinear


def test_a_recipe_on_the_real_transformer_engine_stops(with_transformer_engine, stops):
    message = stops(f"{TE} {MXFP8}")
    assert message.startswith("error: --transformer-impl transformer_engine: --fp8-recipe mxfp8")
    assert message.endswith("set --transformer-impl local")
