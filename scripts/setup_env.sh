# Sourced by the other scripts: makes the virtual environment that they run in, or reuses it.
#
#   setup_env EXTRA,...   installs the project with these extras, a CPU build of torch, and megatron-core
#
# VENV names the environment's folder (default: .venv); PYTHON the interpreter that makes it.

TORCH_VERSION=2.13.0
MEGATRON_VERSION=0.17.1

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 to 3.13 found; install python3.11 and python3.11-venv, or set PYTHON" >&2
    return 1
}

# pip's own notices about indexes are of no interest here; errors are.
quiet_pip() {
    python -m pip --disable-pip-version-check --quiet --quiet "$@"
}

setup_env() {
    local extras=$1 python stamp state index
    VENV=${VENV:-.venv}
    if [ ! -x "$VENV/bin/python" ]; then
        python=$(find_python)
        echo "making the virtual environment $VENV with $python"
        "$python" -m venv "$VENV"
    fi
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"

    # Nothing to install when these extras were installed for the same sources.
    stamp="$VENV/mindspeed-lowp-$extras"
    state=$(cat setup.py pyproject.toml scripts/setup_env.sh mindspeed_lowp/csrc/* | sha256sum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
        return
    fi
    echo "installing torch $TORCH_VERSION, megatron-core $MEGATRON_VERSION and this project [$extras]"
    if ! python -c "import torch; assert torch.__version__.startswith('$TORCH_VERSION')" 2>/dev/null; then
        # A CPU build where pip finds one, on PyTorch's own index if that can be reached; else PyPI's.
        index=https://download.pytorch.org/whl/cpu
        if ! python -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
            index=
        fi
        quiet_pip install "torch==$TORCH_VERSION+cpu" ${index:+--extra-index-url "$index"} 2>/dev/null ||
            quiet_pip install "torch==$TORCH_VERSION"
    fi
    # Its wheel declares Python 3.12 and is built for 3.11 as well.
    quiet_pip install --no-deps --ignore-requires-python "megatron-core==$MEGATRON_VERSION"
    quiet_pip install --editable ".[$extras]"
    echo "$state" >"$stamp"
}
