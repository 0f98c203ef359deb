{{/*
Probes of a pod with ranks. Ready: its whole group takes requests, so that one missing rank takes all pods of the group out
together. Live: the daemon answers; it restarts its ranks itself, so loading, draining or a stuck rank is no reason to kill
it. A kubelet cannot show a certificate: with mutual TLS the question is put inside the container.
*/}}
{{- define "paceline.instanceProbes" -}}
startupProbe:
  {{- include "paceline.ask" (dict "root" . "live" true) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
readinessProbe:
  {{- include "paceline.ask" (dict "root" . "live" false) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- include "paceline.ask" (dict "root" . "live" true) | nindent 2 }}
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 4
{{- end -}}

{{- define "paceline.ask" -}}
{{- $port := .root.Values.ports.grpc -}}
{{- if or .root.Values.compat.oldApi (include "paceline.secured" .root) -}}
exec:
  command: [paceline, health, {{ if .live }}--live, {{ end }}"127.0.0.1:{{ $port }}"]
{{- else -}}
grpc:
  port: {{ $port }}
  {{- if .live }}
  service: live
  {{- end }}
{{- end -}}
{{- end -}}
