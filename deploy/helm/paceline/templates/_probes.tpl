{{/*
Probes of a pod with ranks. Ready: its whole group takes requests, so that one missing rank takes all pods of the group out
together. Live: the daemon answers; it restarts its ranks itself, so loading, draining or a stuck rank is no reason to kill
it. By gRPC where a kubelet can ask: it has no certificate to show, and can ask no pod but the probed one, while in a group of
several pods the leader answers for all.
*/}}
{{- define "paceline.instanceProbes" -}}
{{- $byGrpc := not (or .root.Values.compat.oldApi (include "paceline.secured" .root) (gt (int (include "paceline.podsPerGroup" .)) 1)) -}}
startupProbe:
  {{- include "paceline.ask" (dict "root" .root "live" true "grpc" $byGrpc) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
  failureThreshold: 60
readinessProbe:
  {{- include "paceline.ask" (dict "root" .root "live" false "grpc" $byGrpc) | nindent 2 }}
  periodSeconds: {{ .root.Values.probes.readySeconds }}
  timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
  failureThreshold: 2
livenessProbe:
  {{- include "paceline.ask" (dict "root" .root "live" true "grpc" $byGrpc) | nindent 2 }}
  periodSeconds: {{ .root.Values.probes.liveSeconds }}
  timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
  failureThreshold: 4
{{- end -}}

{{- define "paceline.ask" -}}
{{- if .grpc -}}
grpc:
  port: {{ .root.Values.ports.grpc }}
  {{- if .live }}
  service: live
  {{- end }}
{{- else -}}
exec: {command: [paceline-pod, {{ ternary "live" "ready" .live }}]}
{{- end -}}
{{- end -}}
