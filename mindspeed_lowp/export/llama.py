"""Megatron's GPT under the names of Hugging Face's Llama and Mixtral, where the two compute the same.

The same means: what Megatron computes with these options, the other model computes from the same matrices, of
which the fused ones are cut between rows. So blocks and scales along the rows are not touched. In any other
case Megatron's own names are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from mindspeed_lowp.export.checkpoint import Checkpoint, Parameter, Training

# The options of Megatron that must stand so, or be absent, for Llama's and Mixtral's formulas.
_REQUIRED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    "swiglu": True,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "no_rope_freq": None,
    "qk_layernorm": False,
    "qk_l2_norm": False,
    "linear_attention_freq": None,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "softmax_scale": None,
    "window_size": None,
    "use_mup": False,
    "apply_residual_connection_post_layernorm": False,
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_expert_capacity_factor": None,
    "moe_apply_probs_on_input": False,
}

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
_WHOLE = {
    **_NORMS,
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "block_sparse_moe.gate.weight",
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def rename(parameters: list[Parameter], options: dict[str, Any], training: Training) -> Checkpoint:
    """The checkpoint with Hugging Face's names and config.json, or Megatron's own where that is not exact.

    Args:
        parameters: under Megatron's names, every layer and expert numbered.
        options: of the training run, as Megatron saves them.
        training: goes into the checkpoint.
    """
    reason = _difference(options)
    renamed: list[Parameter] = []
    if reason is None:
        for parameter in parameters:
            parts = _renamed(parameter, options)
            if not parts:
                reason = f"it has {parameter.name}"
                break
            renamed += parts
    if reason is None:
        return Checkpoint(
            shards={"": renamed},
            config=_config(options, parameters),
            cut=True,
            training=training,
            notes=["Names and config.json are those of Hugging Face's " + _model(options)],
        )
    return Checkpoint(
        shards={"": parameters},
        config={},
        cut=True,
        training=training,
        notes=[
            f"Names are Megatron's own: Hugging Face's Llama and Mixtral compute something else ({reason})"
        ],
    )


def _difference(options: dict[str, Any]) -> str | None:
    """An option that makes the model another than Llama or Mixtral; None if there is none."""
    if not options:
        return "the checkpoint does not tell its options"
    for name, required in _REQUIRED.items():
        value = options.get(name, required)
        if value != required:
            return f"{name} is {value!r}"
    return None


def _model(options: dict[str, Any]) -> str:
    return "MixtralForCausalLM" if options.get("num_experts") else "LlamaForCausalLM"


def _renamed(parameter: Parameter, options: dict[str, Any]) -> list[Parameter]:
    """The parameters that one of Megatron's becomes in Hugging Face's model; none if it has no such."""

    def part(name: str, rows: int | None = None, cut: Callable[[Tensor], Tensor] | None = None) -> Parameter:
        shape = parameter.shape if rows is None else (rows, *parameter.shape[1:])
        read = parameter.read if cut is None else partial(_cut, parameter, cut)
        return Parameter(name, shape, parameter.dtype, read, layer=parameter.layer)

    if parameter.name in _OUTSIDE:
        return [part(_OUTSIDE[parameter.name])]
    match = _LAYER.fullmatch(parameter.name)
    if not match:
        return []
    prefix, name = f"model.layers.{match[1]}.", match[2]
    if name in _WHOLE:
        return [part(prefix + _WHOLE[name])]
    if name == "self_attention.linear_qkv.weight":
        heads, groups, size = _attention(options)
        cuts = {"q": slice(0, heads // groups), "k": slice(-2, -1), "v": slice(-1, None)}
        return [
            part(
                f"{prefix}self_attn.{kind}_proj.weight",
                rows=(heads if kind == "q" else groups) * size,
                cut=partial(_heads, groups=groups, size=size, chosen=chosen),
            )
            for kind, chosen in cuts.items()
        ]
    expert = _EXPERT.fullmatch(name)
    if name == "mlp.linear_fc1.weight" or (expert and expert[2] == "linear_fc1"):
        half = parameter.shape[0] // 2
        names = ("mlp.gate_proj", "mlp.up_proj")
        if expert:
            names = tuple(f"block_sparse_moe.experts.{expert[1]}.{w}" for w in ("w1", "w3"))
        return [
            part(f"{prefix}{names[0]}.weight", rows=half, cut=lambda weight: weight[:half]),
            part(f"{prefix}{names[1]}.weight", rows=half, cut=lambda weight: weight[half:]),
        ]
    if expert:
        return [part(f"{prefix}block_sparse_moe.experts.{expert[1]}.w2.weight")]
    return []


def _cut(parameter: Parameter, cut: Callable[[Tensor], Tensor]) -> Tensor:
    return cut(parameter.read()).contiguous()


def _heads(weight: Tensor, groups: int, size: int, chosen: slice) -> Tensor:
    """The queries, keys or values of a fused weight: each group has its queries, a key and a value."""
    grouped = weight.view(groups, -1, size, weight.shape[-1])
    return grouped[:, chosen].reshape(-1, weight.shape[-1])


def _attention(options: dict[str, Any]) -> tuple[int, int, int]:
    """Heads, groups that share a key and a value, and the size of a head."""
    heads = options["num_attention_heads"]
    groups = options["num_query_groups"] if options.get("group_query_attention") else heads
    return heads, groups, options.get("kv_channels") or options["hidden_size"] // heads


def _config(options: dict[str, Any], parameters: Sequence[Parameter]) -> dict[str, Any]:
    heads, groups, size = _attention(options)
    embedding = next(p for p in parameters if p.name == "embedding.word_embeddings.weight")
    experts = options.get("num_experts")
    config = {
        "architectures": [_model(options)],
        "model_type": "mixtral" if experts else "llama",
        "vocab_size": embedding.shape[0],  # as padded by Megatron
        "hidden_size": options["hidden_size"],
        "intermediate_size": options["ffn_hidden_size"],
        "num_hidden_layers": options["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": options["max_position_embeddings"],
        "rms_norm_eps": options.get("norm_epsilon") or options.get("layernorm_epsilon"),
        "rope_theta": float(options["rotary_base"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(p.name != "output_layer.weight" for p in parameters),
        "torch_dtype": str(embedding.dtype).removeprefix("torch."),
    }
    if experts:
        config |= {
            "intermediate_size": options.get("moe_ffn_hidden_size") or options["ffn_hidden_size"],
            "num_local_experts": experts,
            "num_experts_per_tok": options["moe_router_topk"],
            "sliding_window": None,
        }
    return config
