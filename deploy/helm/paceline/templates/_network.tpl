{{/* Pieces of network policies. */}}

{{- define "paceline.rankPorts" -}}
{{- if .Values.compat.oldApi -}}
- protocol: TCP
{{- else -}}
- {protocol: TCP, port: {{ .Values.ports.ranks.from }}, endPort: {{ .Values.ports.ranks.to }}}
{{- end -}}
{{- end -}}

{{- define "paceline.egressToDns" -}}
- to: {{- toYaml .Values.networkPolicy.dns | nindent 4 }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end -}}
