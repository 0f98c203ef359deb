{{/* What a schema cannot say: values that are fine by themselves and do not go together. */}}
{{- define "paceline.checks" -}}
{{- $ranks := .Values.ports.ranks -}}
{{- if gt (int $ranks.from) (int $ranks.to) -}}
{{- fail (printf "ports.ranks: from (%d) is more than to (%d)" (int $ranks.from) (int $ranks.to)) -}}
{{- end -}}
{{- range $name := list "grpc" "http" "registry" "metrics" -}}
{{- $port := int (index $.Values.ports $name) -}}
{{- if and (ge $port (int $ranks.from)) (le $port (int $ranks.to)) -}}
{{- fail (printf "ports.%s (%d) is inside ports.ranks (%d to %d): a rank could take it first" $name $port (int $ranks.from) (int $ranks.to)) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $last := sub (add $.Values.ports.ring (mul 4 (index $.Values $role).ranks)) 1 -}}
{{- if and (ge (int $last) (int $ranks.from)) (le (int $.Values.ports.ring) (int $ranks.to)) -}}
{{- fail (printf "ports.ring (%d to %d for %s) overlaps ports.ranks (%d to %d)" (int $.Values.ports.ring) $last $role (int $ranks.from) (int $ranks.to)) -}}
{{- end -}}
{{- range $name := list "grpc" "metrics" -}}
{{- $port := int (index $.Values.ports $name) -}}
{{- if and (ge $port (int $.Values.ports.ring)) (le $port (int $last)) -}}
{{- fail (printf "ports.%s (%d) is one of the ring's ports (%d to %d for %s)" $name $port (int $.Values.ports.ring) $last $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.groups "lws") (not .Values.lws.maxUnavailable) (not .Values.lws.maxSurge) -}}
{{- fail "lws: maxUnavailable and maxSurge are both 0, so an update could replace nothing" -}}
{{- end -}}
{{- if and .Values.compat.oldApi (eq .Values.groups "lws") -}}
{{- fail "compat.oldApi: the LeaderWorkerSet controller needs a newer Kubernetes; set groups: statefulset" -}}
{{- end -}}
{{- if and (eq .Values.security.mode "certManager") (not .Values.security.certManager.issuer) -}}
{{- fail "security.mode is certManager, but security.certManager.issuer names no issuer" -}}
{{- end -}}
{{- end -}}
