#!/usr/bin/env bash
# Test with each version of Megatron core that is supported, or with those named:
#
#   bash scripts/test_matrix.sh [VERSION ...]
#
# 0.17.1 runs all tests. The wheels of the others have no trainer: they run those of layers and experts, alone and
# over two ranks; their trainers are those of checkouts (tests/hosts/test_megatron_lm.py).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_env megatron,test

LAYER_TESTS=(tests/megatron/test_layers.py tests/megatron/test_grouped_mlp.py)

# An environment inside the main one, which has all but this megatron-core from there.
setup_version() {
    local version=$1 env=$VENV/megatron-$1 main site
    main=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    if [ ! -x "$env/bin/python" ]; then
        python -m venv --without-pip "$env"
    fi
    site=$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    echo "import site; site.addsitedir('$main')" >"$site/main.pth"
    if [ ! -d "$site/megatron_core-$version.dist-info" ]; then
        quiet_pip install --no-deps --ignore-requires-python --target "$site" "megatron-core==$version"
    fi
    touch "$site/megatron/__init__.py" # else the main environment's megatron.training would join this package
    "$env/bin/python" -W ignore -c "import megatron.core as m; assert m.__version__ == '$version', m.__version__"
}

if [ $# = 0 ]; then
    set -- 0.12.1 0.16.1 "$MEGATRON_VERSION"
fi
for version in "$@"; do
    echo "== megatron-core $version"
    if [ "$version" = "$MEGATRON_VERSION" ]; then
        bash scripts/test.sh tests
    else
        setup_version "$version"
        OMP_NUM_THREADS=1 "$VENV/megatron-$version/bin/python" -m pytest -p no:xdist --disable-warnings "${LAYER_TESTS[@]}"
    fi
done
