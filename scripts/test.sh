#!/usr/bin/env bash
# Set up what the tests need, then run the linter and all tests: first those of the kernels under sanitizers and
# those of Megatron's layers with older versions of it.
# Arguments go to pytest, which then runs alone.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env megatron,test

if command -v g++ >/dev/null; then
    # Where they were not built, their tests are skipped: that must not pass for success.
    python -c "from mindspeed_lowp.ops import kernels; assert kernels.available(), 'the C++ kernels were not built'"
fi
ruff check .
ruff format --check .
if [ $# = 0 ]; then
    bash scripts/sanitize_kernels.sh --quiet
    bash scripts/test_matrix.sh 0.12.1 0.16.1
fi
# Two processes of one thread each: the tests that start training jobs bring processes of their own.
OMP_NUM_THREADS=1 python -m pytest --numprocesses "${TEST_PROCESSES:-2}" --dist worksteal "$@"
