#!/usr/bin/env bash
# Run the tests of the C++ kernels over a build with AddressSanitizer and UndefinedBehaviorSanitizer. Arguments
# go to pytest. Needs g++ and, activated, an environment with the test extra; installed kernels are not touched.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v g++ >/dev/null; then
    echo "sanitizers: no g++ here, so the kernels are not checked with them"
    exit
fi
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# One level is enough: all are compiled from the same plain loops.
flags=(-std=c++17 -O1 -g -pthread -fPIC -ffp-contract=off -DLOWP_LEVEL=base)
flags+=(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
g++ "${flags[@]}" -shared -o "$build/kernels.so" mindspeed_lowp/csrc/*.cpp
export LOWP_KERNELS="$build/kernels.so"

# The sanitizers must be there before Python is. What Python and torch never free is not of interest.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
export LD_PRELOAD ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1

# Do they see anything at all? A kernel is told that 32 elements are 33.
python - 2>"$build/report" <<'EOF' || true
import torch
from mindspeed_lowp.ops.kernels import mxfp4

x, y = torch.ones(32), torch.empty(32)
mxfp4._quant_dequant(x.data_ptr(), y.data_ptr(), 1, 33, 32, 6.0, 0, 2, 1)
EOF
if ! grep -q "ERROR: AddressSanitizer: heap-buffer-overflow" "$build/report"; then
    cat "$build/report" >&2
    echo "error: the sanitizers let a read beyond a tensor pass" >&2
    exit 1
fi

# The test modules that call kernels themselves. pytest must not capture what the sanitizers print.
mapfile -t modules < <(grep -l "^from mindspeed_lowp.ops.kernels import" tests/ops/test_*.py)
python -m pytest --capture=sys -k "not reference" --numprocesses "${TEST_PROCESSES:-2}" "${modules[@]}" "$@"
