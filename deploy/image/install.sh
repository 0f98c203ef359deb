#!/bin/sh
# Fills /opt/paceline, inside the image's build stage: install.sh cpu|cuda libraries|paceline
#
# libraries: every dependency of pyproject.toml at the versions of constraints.txt; needs no source but these two files.
# paceline: the product itself, from the checkout in the working directory; and pip goes.
set -eu
variant=$1 step=$2
pip=/opt/paceline/bin/pip

dependencies() { # of pyproject.toml: the run-time list and the variant's extra, one a line
    python3 - "$variant" <<'PYTHON'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *extras[sys.argv[1]], *extras["otel"], sep="\n")
PYTHON
}

case $variant in cpu | cuda) ;; *) echo "install.sh: VARIANT is '$variant'; it is cpu or cuda" >&2; exit 2 ;; esac
case $step in
libraries)
    python3 -m venv /opt/paceline
    dependencies >/tmp/all
    # torch first and alone: its own index may be named for it, and the rest must not change it.
    "$pip" install -c constraints.txt "$(grep '^torch==' /tmp/all)"
    if [ "$variant" = cpu ]; then
        # The umbrella package asks for both halves, 430 MB; a host without CUDA needs either.
        grep -v '^nixl==' /tmp/all >/tmp/most
        "$pip" install -c constraints.txt -r /tmp/most
        version=$(sed -n 's/^nixl==//p' /tmp/all)
        "$pip" install --no-deps "nixl==$version" "nixl-cu12==$version"
    else
        "$pip" install -c constraints.txt -r /tmp/all
    fi
    ;;
paceline)
    # Before the package, which takes the result along: the image itself has no compiler.
    python3 -m engine.native.build
    "$pip" install -c constraints.txt "$(grep '^setuptools==' deploy/image/constraints.txt)"
    "$pip" install --no-deps --no-build-isolation .
    # What only builds and tests of the libraries need, 200 MB: nothing in the image can install or compile.
    "$pip" uninstall -y setuptools pip
    cd /opt/paceline/lib/python3*/site-packages
    rm -rf torch/include torch/test torch/bin/protoc* torch/bin/test_* mooncake/transfer_engine_bench
    ;;
*) echo "install.sh: the step is '$step'; it is libraries or paceline" >&2; exit 2 ;;
esac
