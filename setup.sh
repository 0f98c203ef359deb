#!/usr/bin/env bash
# Makes this checkout runnable: Debian packages, .venv with all dependencies, the default model.
# Every step is skipped when already done, so a second run takes a second.
set -euo pipefail
cd "$(dirname "$0")"

VENV=.venv
STAMP=$VENV/.paceline-setup
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 to 3.13 found as python3.11 or python3; install one (Debian 12: apt-get install python3)" \
        "or name it: make setup PYTHON=/path/to/python"
}

# The libraries that Mooncake's extension links against, a compiler for the attention kernel, and the venv module.
missing_packages() {
    local known
    known=$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p)
    [[ $known == *libibverbs.so.1* ]] || echo libibverbs1
    [[ $known == *libnuma.so.1* ]] || echo libnuma1
    [[ $known == *libcurl.so.4* ]] || echo libcurl4
    [[ -n ${CC:-} ]] || command -v gcc >/dev/null || printf '%s\n' gcc libc6-dev
    if [[ ! -x $VENV/bin/python ]] && ! "$1" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "python$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    fi
}

install_packages() {
    local root=()
    if ! command -v apt-get >/dev/null; then
        fail "these system libraries are missing and there is no apt-get to install them with: $*"
    fi
    if [[ $(id -u) -ne 0 ]]; then
        command -v sudo >/dev/null || fail "please install as root, then run again: apt-get install $*"
        root=(sudo)
    fi
    say "installing Debian packages: $*"
    "${root[@]}" apt-get update -qq || fail "apt-get update failed; please install: $*"
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
        fail "apt-get install failed; please install: $*"
}

# torch comes first and by pip: pip prefers a CPU build where one is on offer (a find-links folder or an
# extra index), uv does not look there. uv installs the rest much faster and must leave torch alone.
install_python_packages() {
    local pip=$VENV/bin/pip torch before after
    torch=$(sed -nE 's/^ *"(torch==[^"]+)",$/\1/p' pyproject.toml)
    "$pip" install -q uv
    say "installing $torch (the largest part: minutes on a slow network)"
    "$pip" install -q "$torch"
    before=$(torch_version)
    say "installing the other dependencies"
    # uv reads no pip configuration: hand on what pip was told.
    local index
    index=$("$pip" config get global.index-url 2>/dev/null || true)
    [[ -z $index || -n ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]] || export UV_DEFAULT_INDEX=$index
    [[ -z ${PIP_CERT:-} ]] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}
    if ! "$VENV/bin/uv" pip install -q --python "$VENV/bin/python" -e '.[cpu,dev]'; then
        say "uv could not; trying pip, which is slower"
        "$pip" install -q -e '.[cpu,dev]'
    fi
    after=$(torch_version)
    [[ $before == "$after" ]] || fail "torch was replaced: $before became $after"
}

torch_version() { "$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))'; }

# What the stamp must say for nothing to be left to do. The folder counts: a moved .venv is broken.
fingerprint() { { cat pyproject.toml setup.sh; pwd; } | sha256sum; }

if [[ -f $STAMP && $(cat "$STAMP") == "$(fingerprint)" ]]; then
    say "dependencies are up to date"
else
    PY=$(find_python)
    say "using $PY ($("$PY" -V))"
    mapfile -t packages < <(missing_packages "$PY")
    [[ ${#packages[@]} -eq 0 ]] || install_packages "${packages[@]}"
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "making $VENV"
        "$PY" -m venv --clear "$VENV"
    fi
    install_python_packages
    fingerprint >"$STAMP"
fi
"$VENV/bin/python" -m engine.native.build || # seconds once, and after its source or flags have changed
    say "going on without the compiled kernel: attention will be many times slower"
"$VENV/bin/python" -m engine.smollm2 # downloads 93 MB once and converts it; says so
