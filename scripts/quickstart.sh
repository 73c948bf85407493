#!/usr/bin/env bash
# Set everything up, then train one small GPT three times on the source text of Python's standard library:
# in bf16, in MXFP8, and in MXFP8 with deferred backward quantization. Ends with a table and a plot.
#
# STEPS (default 200) shortens or lengthens the runs; OUTPUT names the folder for data, logs and plot.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env megatron,quickstart

STEPS=${STEPS:-200}
OUTPUT=${OUTPUT:-output/quickstart}
source scripts/small_gpt.sh

train bf16
train mxfp8 --fp8-format e4m3 --fp8-recipe mxfp8
train mxfp8-deferred --fp8-format e4m3 --fp8-recipe mxfp8 --mxfp8-defer-backward-quant

echo
python scripts/compare_runs.py --plot "$OUTPUT/loss.png" \
    "bf16=$OUTPUT/bf16.log" "mxfp8=$OUTPUT/mxfp8.log" "mxfp8, deferred=$OUTPUT/mxfp8-deferred.log"
