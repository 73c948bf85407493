#!/usr/bin/env bash
# Pretrain a GPT mixture of experts in MXFP8 on Ascend 950 nodes of 8 NPUs, under MindSpeed.
#
# Run it on every node, with NODE_RANK and MASTER_ADDR set. Every setting below is a variable:
#
#   DATA_PATH=/data/corpus_text_document TOKENIZER_MODEL=/data/tokenizer.model \
#   SAVE_DIR=/ckpt/gpt NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 bash scripts/pretrain_gpt_mxfp8.sh
#
# Further arguments go to the training script as they are.
set -euo pipefail

# The script to train with: that of a Megatron-LM checkout, which MindSpeed belongs to, or this repository's.
PRETRAIN_SCRIPT=${PRETRAIN_SCRIPT:-pretrain_gpt.py}
CANN_ENV=${CANN_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}
DATA_PATH=${DATA_PATH:?set DATA_PATH to the prefix of an indexed dataset (without .bin and .idx)}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-Llama2Tokenizer}
TOKENIZER_MODEL=${TOKENIZER_MODEL:?set TOKENIZER_MODEL to the file of the tokenizer}
SAVE_DIR=${SAVE_DIR:?set SAVE_DIR to the folder that takes the checkpoints}
LOAD_DIR=${LOAD_DIR:-$SAVE_DIR}

# Nodes
NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}

# Parallelism
TP=${TP:-2}
PP=${PP:-2}
EP=${EP:-2}

# Precision. TRANSFORMER_IMPL: MindSpeed has its layers under `transformer_engine`; without MindSpeed, `local`.
# DEFER=1 defers the quantization for backward (layers of `local` only).
FP8_FORMAT=${FP8_FORMAT:-e4m3}
TRANSFORMER_IMPL=${TRANSFORMER_IMPL:-transformer_engine}
DEFER=${DEFER:-0}

if [ -f "$CANN_ENV" ]; then
    set +u # CANN's own script reads variables that may be unset
    # shellcheck disable=SC1090
    source "$CANN_ENV"
    set -u
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron's order of communication and computation
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1800}
export HCCL_EXEC_TIMEOUT=${HCCL_EXEC_TIMEOUT:-1800}
export HCCL_IF_BASE_PORT=${HCCL_IF_BASE_PORT:-64000}
export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}
export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE:-2}

DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPUS_PER_NODE"
    --nnodes "$NNODES"
    --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --expert-model-parallel-size "$EP"
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

MODEL_ARGS=(
    --transformer-impl "$TRANSFORMER_IMPL"
    --num-layers "${NUM_LAYERS:-32}"
    --hidden-size "${HIDDEN_SIZE:-4096}"
    --ffn-hidden-size "${FFN_HIDDEN_SIZE:-14336}"
    --num-attention-heads "${NUM_HEADS:-32}"
    --group-query-attention
    --num-query-groups "${NUM_QUERY_GROUPS:-8}"
    --seq-length "${SEQ_LENGTH:-4096}"
    --max-position-embeddings "${SEQ_LENGTH:-4096}"
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)

MOE_ARGS=(
    --num-experts "${NUM_EXPERTS:-8}"
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
)

PRECISION_ARGS=(
    --bf16
    --fp8-format "$FP8_FORMAT"
    --fp8-recipe mxfp8
)
if [ "$DEFER" = 1 ]; then
    PRECISION_ARGS+=(--mxfp8-defer-backward-quant)
fi
if [ "$TRANSFORMER_IMPL" = transformer_engine ]; then
    MODEL_ARGS+=(--use-flash-attn) # MindSpeed's layers of that name require it
fi

TRAINING_ARGS=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-64}"
    --train-iters "${TRAIN_ITERS:-2000}"
    --lr "${LR:-1.0e-5}"
    --min-lr "${MIN_LR:-1.0e-6}"
    --lr-decay-style cosine
    --lr-warmup-fraction 0.01
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.01
)

DATA_ARGS=(
    --data-path "$DATA_PATH"
    --tokenizer-type "$TOKENIZER_TYPE"
    --tokenizer-model "$TOKENIZER_MODEL"
    --split 949,50,1
)

OUTPUT_ARGS=(
    --save "$SAVE_DIR"
    --load "$LOAD_DIR"
    --save-interval "${SAVE_INTERVAL:-500}"
    --eval-interval "${EVAL_INTERVAL:-500}"
    --eval-iters 10
    --log-interval 1
    --log-throughput
)

torchrun "${DISTRIBUTED_ARGS[@]}" -m mindspeed_lowp.run "$PRETRAIN_SCRIPT" \
    "${PARALLEL_ARGS[@]}" \
    "${MODEL_ARGS[@]}" \
    "${MOE_ARGS[@]}" \
    "${PRECISION_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${OUTPUT_ARGS[@]}" \
    --distributed-backend nccl \
    "$@"
