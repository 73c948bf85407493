#!/usr/bin/env bash
# What MXFP4 costs the small GPT of the quickstart, and what quantization-aware training gets back.
#
# Trains it in bf16, then goes on from that checkpoint twice, for the same steps on the same data: in bf16 and
# quantization-aware. Each checkpoint is evaluated as it is and fake-quantized, always on the same batches.
# Fine-tuning in bf16 is the measure: what further training alone brings is not to be credited to QAT.
#
# STEPS and QAT_STEPS lengthen or shorten the runs, SCHEME is any of --qat-scheme; OUTPUT takes data, logs and
# checkpoints, of runs of these lengths only. Finished runs are not repeated: an interrupted demonstration goes on
# where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env megatron,quickstart

STEPS=${STEPS:-300}
QAT_STEPS=${QAT_STEPS:-100}
SCHEME=${SCHEME:-w4a16-mxfp4}
OUTPUT=${OUTPUT:-output/qat-$STEPS-$QAT_STEPS}
source scripts/small_gpt.sh
lengths="STEPS=$STEPS QAT_STEPS=$QAT_STEPS"
if [ "$(cat "$OUTPUT/lengths" 2>/dev/null || echo "$lengths")" != "$lengths" ]; then
    echo "error: $OUTPUT holds runs of $(cat "$OUTPUT/lengths"), not $lengths: set another OUTPUT" >&2
    exit 1
fi
echo "$lengths" >"$OUTPUT/lengths"

# Larger batches than the quickstart's: of a model that has learned little, rounding costs next to nothing.
BATCH=(--micro-batch-size 16 --global-batch-size 16)
EVALUATE=("${BATCH[@]}" --finetune --skip-train --eval-iters 12)
FINE_TUNE=(
    "${BATCH[@]}" --load "$OUTPUT/float" --finetune --train-iters "$QAT_STEPS" --lr 5e-4 --min-lr 5e-6
    --eval-interval "$QAT_STEPS" --eval-iters 1 --save-interval "$QAT_STEPS"
)
QAT=(--qat-scheme "$SCHEME")

train_once() { # NAME FLAGS...
    if ! grep -q "validation loss.*on test set" "$OUTPUT/$1.log" 2>/dev/null; then
        train "$@"
    fi
}

train_once float "${BATCH[@]}" --lr 2e-3 --eval-iters 1 --save "$OUTPUT/float" --save-interval "$STEPS"
train_once tuned "${FINE_TUNE[@]}" --save "$OUTPUT/tuned"
train_once "qat-$SCHEME" "${FINE_TUNE[@]}" --save "$OUTPUT/qat-$SCHEME" "${QAT[@]}"
for model in float tuned; do
    train_once $model-in-bf16 --load "$OUTPUT/$model" "${EVALUATE[@]}"
    train_once "$model-in-$SCHEME" --load "$OUTPUT/$model" "${EVALUATE[@]}" "${QAT[@]}"
done
train_once "qat-in-$SCHEME" --load "$OUTPUT/qat-$SCHEME" "${EVALUATE[@]}" "${QAT[@]}"

python - "$OUTPUT" "$SCHEME" "$STEPS" "$QAT_STEPS" <<'END'
import re
import sys
from pathlib import Path

output, scheme, steps, qat_steps = sys.argv[1:]


def loss(run: str) -> float:
    """The mean of the losses on the validation and on the test set, of as many tokens each."""
    text = Path(output, f"{run}.log").read_text()
    found = re.findall(r"on (?:validation|test) set \| lm loss value: (\S+)", text)
    return sum(map(float, found)) / len(found)


trained, rounded = loss("float-in-bf16"), loss(f"float-in-{scheme}")
tuned, tuned_rounded, qat = loss("tuned-in-bf16"), loss(f"tuned-in-{scheme}"), loss(f"qat-in-{scheme}")
share = (tuned_rounded - qat) / (tuned_rounded - tuned)
print(f"""
{scheme}: loss on held-out text, the same for each

| model | computing in bf16 | in {scheme} | rounding costs |
|---|---|---|---|
| after {steps} steps in bf16 | {trained:.5f} | {rounded:.5f} | {rounded - trained:.5f} |
| and {qat_steps} more in bf16 | {tuned:.5f} | {tuned_rounded:.5f} | {tuned_rounded - tuned:.5f} |
| or {qat_steps} more of QAT | | {qat:.5f} | {qat - tuned:.5f} |

Of what rounding costs the model that was trained as long in bf16, QAT gets back {share:.0%}.
""")
END
