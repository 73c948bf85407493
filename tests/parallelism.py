"""The ways to divide or to order the work of a small GPT, and the recipes, that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from .trainer import MOE

# Shards of 128 features and 128 rows, whole in every recipe's blocks.
MODEL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 4 --global-batch-size 8 --untie-embeddings-and-output-weights
    --make-vocab-size-divisible-by 256 --lr 1e-4
""".split()
EXPERTS = [*MOE, "--moe-ffn-hidden-size", "256"]

RECIPES = {
    "bf16": "",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "mxfp8, deferred": "--fp8-format e4m3 --fp8-recipe mxfp8 --mxfp8-defer-backward-quant",
    "mxfp8-32x32": "--fp8-format e4m3 --fp8-recipe mxfp8-32x32",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "hif8": "--fp8-format hif8 --fp8-recipe hif8",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
}


@dataclass(frozen=True)
class Way:
    """A way to divide or to order the work.

    regroups: other tokens or features share a block or a scale than in the undivided run, so the losses are
        near to each other and no more.
    refused: the recipes with which the run stops at its start.
    """

    flags: str
    ranks: int = 1
    models: tuple[str, ...] = ("dense", "moe")
    regroups: bool = False
    refused: tuple[str, ...] = ()


_DENSE, _MOE = ("dense",), ("moe",)
_OVERLAPPED = (
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm"
)
WAYS = {
    "undivided": Way(""),
    "TP 2": Way("--tensor-model-parallel-size 2", 2, _DENSE),
    "TP 2, SP": Way("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "PP 2": Way("--pipeline-model-parallel-size 2", 2),
    "PP 2, interleaved": Way("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
    "DP 2, distributed optimizer, overlapped": Way(
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2
    ),
    "EP 2, alltoall": Way(
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", 2, _MOE, regroups=True
    ),
    "EP 2, allgather": Way(
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather", 2, _MOE, regroups=True
    ),
    "EP 2, overlapped": Way(_OVERLAPPED, 2, _MOE, regroups=True),
    "EP 2, overlapped, weight gradients delayed": Way(
        f"{_OVERLAPPED} --delay-wgrad-compute --transformer-impl transformer_engine",
        2,
        _MOE,
        regroups=True,
        refused=("bf16",),
    ),
    "TP 2, SP, EP 2": Way(
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall",
        2,
        _MOE,
    ),
    "TP 2, SP, PP 2": Way(
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 4
    ),
    "TP 2, SP, DP 2, distributed optimizer": Way(
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer", 4
    ),
    "full recomputation": Way(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "block recomputation": Way(
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    ),
    "selective recomputation": Way("--recompute-activations"),
    "recomputation of norms and attention": Way(
        "--recompute-granularity selective --recompute-modules layernorm core_attn"
    ),
    "recomputation of norms and experts' activations": Way(
        "--recompute-granularity selective --recompute-modules layernorm moe_act", models=_MOE
    ),
    "gradients not fused": Way("--no-gradient-accumulation-fusion"),
    "recomputation of MLPs with biases": Way(
        "--recompute-granularity selective --recompute-modules mlp", models=_DENSE, refused=tuple(RECIPES)
    ),
    "CP 2": Way("--context-parallel-size 2", 2, refused=tuple(RECIPES)),
    "weight gradients delayed, experts not overlapped": Way(
        "--delay-wgrad-compute --transformer-impl transformer_engine", refused=tuple(RECIPES)
    ),
    "asynchronous save in the format torch": Way(
        "--async-save --ckpt-format torch --save saved --save-interval 1", refused=tuple(RECIPES)
    ),
}
