#!/usr/bin/env bash
# Fine-tune a GPT quantization-aware, from a checkpoint in bf16 to one that bears MXFP4.
#
#   LOAD_DIR=/ckpt/gpt SAVE_DIR=/ckpt/gpt-w4a16 DATA_PATH=/data/corpus_text_document \
#   bash scripts/qat_finetune_gpt.sh
#
# TRAIN_ITERS, LR, SPLIT and the other variables below have values that may be set. For a few documents: SPLIT=100,0,0
# and the arguments --eval-iters 0 --eval-interval 1000. The model's shape and the tokenizer are read from the checkpoint (a NullTokenizer needs its --vocab-size besides).
# Further arguments go to the training script as they are, and win: --tensor-model-parallel-size 2, --qat-clip-grad,
# --qat-skip-names decoder.layers.0., --fp8-format e4m3 --fp8-recipe mxfp8, ... On several nodes, run it on each
# with NNODES, NODE_RANK and MASTER_ADDR set.
set -euo pipefail

LOAD_DIR=${LOAD_DIR:?set LOAD_DIR to the folder of the checkpoint to start from}
SAVE_DIR=${SAVE_DIR:?set SAVE_DIR to the folder that takes the fine-tuned checkpoint}
DATA_PATH=${DATA_PATH:?set DATA_PATH to the prefix of an indexed dataset (without .bin and .idx)}

# w4a16-mxfp4 first: it costs least. Then w4a8-mxfp4 or w4a4-mxfp4, from its checkpoint.
QAT_SCHEME=${QAT_SCHEME:-w4a16-mxfp4}
QAT_SCALE_MODE=${QAT_SCALE_MODE:-round}
TRAIN_ITERS=${TRAIN_ITERS:-500}
LR=${LR:-2.0e-6} # about a tenth of the pretraining's, and down from there
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-64}

PRETRAIN_SCRIPT=${PRETRAIN_SCRIPT:-$(dirname "$0")/pretrain_gpt.py} # or that of a Megatron-LM checkout
TRANSFORMER_IMPL=${TRANSFORMER_IMPL:-local}
CANN_ENV=${CANN_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}
if [ -f "$CANN_ENV" ]; then
    set +u # CANN's own script reads variables that may be unset
    # shellcheck disable=SC1090
    source "$CANN_ENV"
    set -u
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron's order of communication and computation

python -m torch.distributed.run --nproc-per-node "${NPROC_PER_NODE:-1}" --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" \
    -m mindspeed_lowp.run "$PRETRAIN_SCRIPT" \
    --load "$LOAD_DIR" --finetune --use-checkpoint-args \
    --qat-scheme "$QAT_SCHEME" --qat-scale-mode "$QAT_SCALE_MODE" \
    --transformer-impl "$TRANSFORMER_IMPL" --bf16 \
    --data-path "$DATA_PATH" --split "${SPLIT:-98,1,1}" \
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size "$GLOBAL_BATCH_SIZE" \
    --train-iters "$TRAIN_ITERS" --lr "$LR" --min-lr 0 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --weight-decay 0.1 --clip-grad 1.0 \
    --log-interval 10 --eval-interval "$TRAIN_ITERS" --eval-iters 10 \
    --save "$SAVE_DIR" --save-interval "$TRAIN_ITERS" \
    "$@"
