# The small GPT that the scripts train on the source text of Python's standard library. To be sourced, in the
# environment of setup_env.sh, with STEPS and OUTPUT set; gives `train NAME FLAGS...`, which logs to
# $OUTPUT/NAME.log.

mkdir -p "$OUTPUT"

# Threads that wait for each other spin for microseconds only: where other programs share the cores, spinning
# for long makes a step many times slower.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}

if [ ! -f "$OUTPUT/stdlib_text_document.idx" ]; then
    python scripts/prepare_data.py --output "$OUTPUT/stdlib" --max-bytes 8000000
fi

MODEL=(
    --num-layers 4 --hidden-size 256 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --transformer-impl local
)
DATA=(
    --data-path "$OUTPUT/stdlib_text_document" --split 98,1,1
    --tokenizer-type NullTokenizer --vocab-size 256
)
TRAINING=(
    --train-iters "$STEPS" --micro-batch-size 4 --global-batch-size 4
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --bf16 --seed 1234
    --log-interval "$((STEPS < 20 ? 1 : 10))" --eval-interval "$STEPS" --eval-iters 4
)

train() { # NAME FLAGS...
    local name=$1
    shift
    echo
    echo "=== $name: pretrain_gpt.py $*"
    # The whole of Megatron's output is in the log; here, its progress and what this project says.
    python scripts/pretrain_gpt.py "${MODEL[@]}" "${DATA[@]}" "${TRAINING[@]}" "$@" 2>&1 |
        tee "$OUTPUT/$name.log" |
        { grep --line-buffered -E "iteration +[0-9]+/|validation loss|MX|QAT|ake-quantized|emulated|Kept in|saved for backward" || true; } || {
        echo "the run stopped; the end of $OUTPUT/$name.log:"
        tail -n 20 "$OUTPUT/$name.log"
        exit 1
    }
}
