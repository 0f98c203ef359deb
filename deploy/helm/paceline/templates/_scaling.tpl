{{/* When to add and remove instances. Up at once, down slowly: a new instance loads a model first. */}}

{{- define "paceline.scalingBehaviour" -}}
scaleUp:
  policies: [{type: Pods, value: 2, periodSeconds: 60}]
scaleDown:
  stabilizationWindowSeconds: {{ .autoscaling.holdSeconds }}
  policies: [{type: Pods, value: 1, periodSeconds: {{ max 60 (int .drainSeconds) }}}]
{{- end -}}

{{/* Instances wanted, as a multiple of the goal: prefill is judged by the first token, decode by the pace of the rest. */}}
{{- define "paceline.scalingQuery" -}}
{{- $jobs := printf "namespace=%q" .root.Release.Namespace -}}
{{- $slo := .root.Values.metrics.slo -}}
{{- $metric := "time_to_first_token_seconds" -}}
{{- $goal := $slo.firstTokenSeconds -}}
{{- if eq .component "decode" -}}
{{- $metric = "inter_token_seconds" -}}
{{- $goal = $slo.interTokenSeconds -}}
{{- end -}}
max(paceline_gateway_serving_instances{ {{- $jobs -}} ,role="{{ .component }}"}) * clamp_max(histogram_quantile(0.95, sum by (le) (rate(paceline_gateway_{{ $metric }}_bucket{ {{- $jobs -}} }[5m]))) / {{ $goal }}, 2)
{{- end -}}
