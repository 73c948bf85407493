#!/usr/bin/env bash
# What MXFP4 costs the small GPT of the quickstart, and what quantization-aware training gets back.
#
# Trains it in bf16, then goes on from that checkpoint twice, for the same steps on the same data: in bf16 and
# quantization-aware. Each checkpoint is evaluated as it is and fake-quantized, always on the same batches.
# Fine-tuning in bf16 is the measure: what further training alone brings is not to be credited to QAT.
#
# STEPS and QAT_STEPS lengthen or shorten the runs, SCHEME is any of --qat-scheme; OUTPUT takes data, logs and
# checkpoints.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env megatron,quickstart

STEPS=${STEPS:-500}
QAT_STEPS=${QAT_STEPS:-100}
SCHEME=${SCHEME:-w4a4-mxfp4}
OUTPUT=${OUTPUT:-output/qat}
source scripts/small_gpt.sh

EVALUATE=(--finetune --skip-train --eval-iters 50)
FINE_TUNE=(
    --load "$OUTPUT/float" --finetune --train-iters "$QAT_STEPS" --lr 3e-4 --min-lr 3e-5
    --eval-interval "$QAT_STEPS" --save-interval "$QAT_STEPS"
)
QAT=(--qat-scheme "$SCHEME")

train float --lr 3e-3 --save "$OUTPUT/float" --save-interval "$STEPS"
train tuned "${FINE_TUNE[@]}" --save "$OUTPUT/tuned"
train qat "${FINE_TUNE[@]}" --save "$OUTPUT/qat" "${QAT[@]}"
for model in float tuned; do
    train $model-in-bf16 --load "$OUTPUT/$model" "${EVALUATE[@]}"
    train $model-rounded --load "$OUTPUT/$model" "${EVALUATE[@]}" "${QAT[@]}"
done
train qat-rounded --load "$OUTPUT/qat" "${EVALUATE[@]}" "${QAT[@]}"

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


trained, rounded = loss("float-in-bf16"), loss("float-rounded")
tuned, tuned_rounded, qat = loss("tuned-in-bf16"), loss("tuned-rounded"), loss("qat-rounded")
print(f"""
{scheme}: loss on held-out text, the same for each

| model | computing in bf16 | in {scheme} | rounding costs |
|---|---|---|---|
| after {steps} steps in bf16 | {trained:.5f} | {rounded:.5f} | {rounded - trained:.5f} |
| and {qat_steps} more in bf16 | {tuned:.5f} | {tuned_rounded:.5f} | {tuned_rounded - tuned:.5f} |
| or {qat_steps} more of QAT | | {qat:.5f} | {qat - tuned:.5f} |

Of what rounding costs the model trained as long in bf16, QAT gets back {(tuned_rounded - qat) / (tuned_rounded - tuned):.0%}
""")
END
