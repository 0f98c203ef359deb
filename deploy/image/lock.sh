#!/usr/bin/env bash
# Writes constraints.txt: every package, direct or not, that an image of either variant may hold, at one version.
set -euo pipefail
cd "$(dirname "$0")/../.."
index=$(.venv/bin/pip config get global.index-url 2>/dev/null || true)
out=deploy/image/constraints.txt
{
    # shellcheck disable=SC2016 # it is a name
    echo '# Every version that an image may hold, direct and indirect; `make image-lock` writes it from pyproject.toml.'
    .venv/bin/uv pip compile --quiet pyproject.toml --extra cuda --extra otel --python-version 3.11 --no-annotate --no-header \
        ${index:+--default-index "$index"}
} >"$out.new"
mv "$out.new" "$out"
