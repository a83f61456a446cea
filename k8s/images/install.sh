#!/bin/sh
# Installs lexshard from a checkout into a virtual environment. The images do this, every node of
# `ray up` does it, and a test does it in a bare Debian root.
#
#   install.sh cpu|cuda CHECKOUT ENVIRONMENT
#
# Debian 12 or Ubuntu 24.04 and later. Python, a C compiler and, for cuda, Python's headers are taken
# from the distribution where they are missing, as root or with sudo; otherwise they must be there.
#
# TORCH_INDEX=URL   where pip finds torch without CUDA, of which PyPI has none for Linux (default:
#                   PyTorch's index of CPU builds; empty: where pip looks anyway)
set -eu

TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}

fail() {
    echo "install.sh: $1" >&2
    exit 2
}

[ $# -eq 3 ] || fail "usage: install.sh cpu|cuda CHECKOUT ENVIRONMENT"
variant=$1 checkout=$2 environment=$3
case $variant in
cpu) extra='[serve]' ;;
cuda) extra='[gpu-cuda13]' ;;
*) fail "'$variant' is neither cpu nor cuda" ;;
esac
[ -f "$checkout/pyproject.toml" ] || fail "no checkout of lexshard at $checkout"

# What is installed, not the models and tests beside it.
parts="pyproject.toml setup.py constraints.txt README.md LICENSE actors cluster kernels loadtest serve_app"
files() (
    cd "$checkout"
    # shellcheck disable=SC2086
    find $parts -name __pycache__ -prune -o -type f -print | LC_ALL=C sort
)
digest=$( (
    echo "$variant $TORCH_INDEX"
    cat "$0" || true # how it is installed
    cd "$checkout" && files | xargs -d '\n' sha256sum
) | sha256sum | cut -d ' ' -f 1)
installed="$environment/.lexshard-installed"
if [ "$(cat "$installed" 2>/dev/null)" = "$digest" ]; then
    echo "install.sh: $environment is up to date"
    exit 0
fi

usable_python() {
    python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}
# Triton compiles what launches its kernels where it runs, in C, against Python.h: both stay.
has_headers() {
    [ "$variant" = cpu ] || python3 -c '
import os, sys, sysconfig
include = sysconfig.get_paths(scheme="posix_prefix")["include"]
sys.exit(not os.path.exists(os.path.join(include, "Python.h")))' 2>/dev/null
}
if ! usable_python || ! command -v cc >/dev/null || ! has_headers; then
    packages="ca-certificates python3 python3-venv gcc libc6-dev"
    [ "$variant" = cpu ] || packages="$packages python3-dev"
    as_root=
    [ "$(id -u)" -eq 0 ] || as_root="sudo -n"
    # shellcheck disable=SC2086
    $as_root apt-get update && $as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install --yes --no-install-recommends $packages ||
        fail "install Python 3.11 or newer with venv, a C compiler, for cuda Python.h: $packages"
    usable_python || fail "the Python of this distribution is older than 3.11"
    has_headers || fail "$(command -v python3) has no Python.h: install the headers of that Python"
fi

[ -x "$environment/bin/python" ] || python3 -m venv "$environment"
pip="$environment/bin/python -m pip --no-cache-dir --disable-pip-version-check"

# pip builds where the sources are, and a checkout may be read-only.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
files | tar -c -C "$checkout" -T - | tar -x -C "$work"
# Triton comes with torch for CUDA, in the version that torch names.
grep -v '^triton==' "$checkout/constraints.txt" >"$work/constraints.txt"
if [ "$variant" = cpu ]; then
    torch=$(grep '^torch==' "$checkout/constraints.txt")
    # shellcheck disable=SC2086
    $pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch+cpu" \
        --constraint "$work/constraints.txt" ||
        echo "install.sh: no $torch+cpu here, so torch brings CUDA, several GB; set TORCH_INDEX" >&2
fi
$pip install --constraint "$work/constraints.txt" "$work$extra"
if [ "$variant" = cuda ]; then
    # CuPy is that of one CUDA, the one that torch's wheel of this release is built for.
    "$environment/bin/python" -c '
import sys, torch
built = torch.version.cuda
sys.exit(f"torch {torch.__version__} is built for CUDA {built}, CuPy for 13" if str(built)[:3] != "13." else 0)
' || fail "let pip find the torch of PyPI: no --find-links, no index of CPU builds"
fi

"$environment/bin/lexshard" config schema >/dev/null
echo "$digest" >"$installed"
echo "install.sh: lexshard $("$environment/bin/lexshard" --version) is in $environment"
