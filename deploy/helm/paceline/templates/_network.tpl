{{/* Pieces of network policies. */}}

{{- define "paceline.rankPorts" -}}
{{- if .Values.compat.oldApi -}}
- protocol: TCP
{{- else -}}
- {protocol: TCP, port: {{ .Values.ports.ranks.from }}, endPort: {{ .Values.ports.ranks.to }}}
{{- end -}}
{{- end -}}

{{/* Ring, store, hidden states and control between pods of one group: four ports for each rank. */}}
{{- define "paceline.ringPorts" -}}
{{- $first := int .root.Values.ports.ring -}}
{{- $count := mul 4 (index .root.Values .role).ranks -}}
{{- if .root.Values.compat.oldApi -}}
{{- range $offset := until (int $count) }}
- {protocol: TCP, port: {{ add $first $offset }}}
{{- end -}}
{{- else -}}
- {protocol: TCP, port: {{ $first }}, endPort: {{ sub (add $first $count) 1 }}}
{{- end -}}
{{- end -}}

{{- define "paceline.egressForAll" -}}
- to: {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- with .Values.networkPolicy.egress }}
{{ toYaml . }}
{{- end }}
{{- end -}}
