#!/usr/bin/env bash
# Replaces the groups of several pods of a release, one whole group after the other; after `helm upgrade` with
# `groups: statefulset`, whose sets of several pods wait for it (updateStrategy OnDelete).
#
#   deploy/helm/roll-groups.sh RELEASE [NAMESPACE] [SECONDS-PER-GROUP]
#
# A group that has the wanted revision already is left alone, so it can be run again after it was interrupted. It stops at
# the first group that does not become ready.
set -euo pipefail

release=${1:?usage: roll-groups.sh RELEASE [NAMESPACE] [SECONDS-PER-GROUP]}
namespace=${2:-default}
seconds=${3:-1800}
in_namespace() { ${KUBECTL:-kubectl} --namespace "$namespace" "$@"; }
field() { in_namespace get "$1" -o "jsonpath={$2}"; }

mapfile -t sets < <(in_namespace get statefulset -l "app.kubernetes.io/instance=$release,paceline/group" -o name | sort)
[[ ${#sets[@]} -gt 0 ]] || { echo "roll-groups: release $release has no groups of several pods in $namespace"; exit 0; }

for set in "${sets[@]}"; do
    # Until the controller has seen the update, the status tells of the revision before it.
    in_namespace wait "--for=jsonpath={.status.observedGeneration}=$(field "$set" .metadata.generation)" "$set" \
        --timeout "${seconds}s" >/dev/null
    wanted=$(field "$set" .spec.replicas)
    revision=$(field "$set" .status.updateRevision)
    name=${set##*/}
    pods=()
    for ((index = 0; index < wanted; index++)); do pods+=("$name-$index"); done
    current=$(in_namespace get pods "${pods[@]}" --ignore-not-found -o \
        'jsonpath={range .items[*]}{.metadata.labels.controller-revision-hash}{"\n"}{end}' | sort | uniq -c | xargs)
    if [[ $current == "$wanted $revision" ]]; then
        echo "roll-groups: $name has its wanted revision"
        continue
    fi
    echo "roll-groups: replacing the $wanted pods of $name"
    # Together: SIGTERM to any of them drains the group.
    in_namespace delete pod "${pods[@]}" --ignore-not-found --timeout "${seconds}s" >/dev/null
    # First the new pods, then their readiness: until they are made, the old number of ready ones may still be shown.
    in_namespace wait "--for=jsonpath={.status.updatedReplicas}=$wanted" "$set" --timeout "${seconds}s" >/dev/null
    in_namespace wait "--for=jsonpath={.status.readyReplicas}=$wanted" "$set" --timeout "${seconds}s" >/dev/null ||
        { echo "roll-groups: $name did not become ready within $seconds s; the groups after it are as they were" >&2; exit 1; }
done
