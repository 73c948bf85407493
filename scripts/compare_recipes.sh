#!/usr/bin/env bash
# Train the small GPT of the quickstart, dense and with experts, in bf16 and by every recipe in every format,
# and write two tables of final losses and bytes kept: $OUTPUT/dense.md and $OUTPUT/moe.md.
#
# STEPS (default 100) shortens or lengthens the runs, which take about half a minute each on two cores. Finished
# runs are not repeated: an interrupted comparison goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env megatron,quickstart

STEPS=${STEPS:-100}
OUTPUT=${OUTPUT:-output/recipes}
source scripts/small_gpt.sh

# With experts the quickstart's learning rate is too hot: within twenty steps the gradient's norm leaps, and where
# that throws the weights decides the loss, in bf16 too. A slower start leaves the recipe to decide it.
MOE=(--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear --moe-ffn-hidden-size 256)
MOE+=(--lr 5e-4 --lr-warmup-fraction 0.3)
FORMATS=$(python - <<'END'
from mindspeed_lowp.recipes import recipe_class, recipe_names

for name in recipe_names():
    for fp8_format in recipe_class(name).formats:
        print(name, fp8_format)
END
)

train_once() { # NAME FLAGS...
    if ! grep -q "validation loss" "$OUTPUT/$1.log" 2>/dev/null; then
        train "$@"
    fi
}

for model in dense moe; do
    flags=()
    if [ $model = moe ]; then flags=("${MOE[@]}"); fi
    train_once $model-bf16 "${flags[@]}"
    runs=("bf16=$OUTPUT/$model-bf16.log")
    while read -r recipe format; do
        name=$recipe-$format
        train_once "$model-$name" "${flags[@]}" --fp8-format "$format" --fp8-recipe "$recipe"
        runs+=("$recipe, $format=$OUTPUT/$model-$name.log")
    done <<<"$FORMATS"
    python scripts/compare_runs.py --markdown "$OUTPUT/$model.md" "${runs[@]}"
done
