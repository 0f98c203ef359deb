#!/usr/bin/env bash
# Builds Paceline's image without a daemon and without an image to start from: a Debian base by debootstrap, then
# the Dockerfile by buildah. Needs root.
#
#   deploy/image/build.sh [--variant cpu|cuda] [--target paceline|paceline-smollm2] [--tag NAME] [--archive FILE]
#
# Out: an image in buildah's store, and with --archive an OCI archive to hand to a registry or a node. Where pip and
# apt look is taken from how they are configured here, never from this repository.
set -euo pipefail
cd "$(dirname "$0")/../.."

VARIANT=cpu TARGET=paceline-smollm2 TAG='' ARCHIVE=''
SUITE=bookworm
CACHE=${PACELINE_CACHE:-$HOME/.cache/paceline}/image

say() { printf 'image: %s\n' "$*"; }
fail() { printf 'image: error: %s\n' "$*" >&2; exit 1; }

while [[ $# -gt 0 ]]; do
    [[ $# -ge 2 ]] || fail "$1 needs a value"
    case $1 in
    --variant) VARIANT=$2 ;;
    --target) TARGET=$2 ;;
    --tag) TAG=$2 ;;
    --archive) ARCHIVE=$2 ;;
    *) fail "unknown option $1" ;;
    esac
    shift 2
done
[[ $VARIANT == cpu || $VARIANT == cuda ]] || fail "--variant is '$VARIANT'; it is cpu or cuda"
[[ $(id -u) -eq 0 ]] || fail "debootstrap and buildah in chroot isolation need root"
VERSION=$(sed -nE 's/^version = "(.+)"$/\1/p' pyproject.toml)
TAG=${TAG:-localhost/$TARGET:$VERSION-$VARIANT}

if ! command -v buildah >/dev/null || ! command -v debootstrap >/dev/null; then
    say "installing buildah and debootstrap"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends buildah runc debootstrap >/dev/null
fi

# Named by what it is made of, so a changed list makes a new one.
BASE=localhost/paceline-base:$SUITE-$(sha256sum deploy/image/packages.txt | cut -c1-12)
if ! buildah inspect --type image "$BASE" >/dev/null 2>&1; then
    # shellcheck disable=SC2016 # apt expands it
    mirror=$(apt-get indextargets --format '$(REPO_URI)' "Codename: $SUITE" "Created-By: Packages" | head -n 1)
    [[ -n $mirror ]] || fail "apt knows no mirror of $SUITE; the base is made on a Debian 12 host"
    say "making the base of Debian $SUITE"
    mkdir -p "$CACHE"
    rootfs=$(mktemp -d "$CACHE/rootfs.XXXXXX")
    trap 'rm -rf "$rootfs"' EXIT
    debootstrap --variant=minbase --include="$(paste -sd, deploy/image/packages.txt)" "$SUITE" "$rootfs" "$mirror" \
        >"$CACHE/debootstrap.log" || fail "debootstrap failed; the last lines of $CACHE/debootstrap.log:" \
        "$(tail -n 3 "$CACHE/debootstrap.log")"
    rm -rf "$rootfs"/var/cache/apt/* "$rootfs"/var/lib/apt/lists/* "$rootfs"/usr/share/{doc,man,info,locale}/*
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$rootfs" / >/dev/null
    buildah commit --quiet --rm "$container" "$BASE" >/dev/null
fi

arguments=() volumes=()
pip=(python3 -m pip)
[[ ! -x .venv/bin/pip ]] || pip=(.venv/bin/pip)
setting() { "${pip[@]}" config get "global.$1" 2>/dev/null || true; }
hand_on() { # NAME VALUE: a build argument, and a mount for each local folder that it names
    [[ -n $2 ]] || return 0
    arguments+=(--build-arg "$1=$2")
    local word path
    for word in $2; do
        path=${word#file://}
        [[ ! -e $path ]] || volumes+=(--volume "$path:$path:ro")
    done
}
hand_on PIP_INDEX_URL "${PIP_INDEX_URL:-$(setting index-url)}"
hand_on PIP_FIND_LINKS "${PIP_FIND_LINKS:-$(setting find-links)}"
hand_on PIP_CERT "${PIP_CERT:-$(setting cert)}"

say "building $TAG"
buildah bud --isolation chroot --format docker --layers --ignorefile deploy/image/ignore \
    --file deploy/image/Dockerfile --target "$TARGET" --build-arg BASE="$BASE" --build-arg VARIANT="$VARIANT" \
    "${arguments[@]}" "${volumes[@]}" --tag "$TAG" .
if [[ -n $ARCHIVE ]]; then
    buildah push --quiet "$TAG" "oci-archive:$ARCHIVE:$TAG"
    say "wrote $ARCHIVE"
fi
say "built $TAG: $(buildah inspect --type image --format '{{.FromImageID}}' "$TAG" | cut -c1-12)"
