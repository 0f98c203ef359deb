{{/* Names, labels and checks that all objects share. A group of ranks is the unit of everything below. */}}

{{- define "paceline.fullname" -}}
{{- if contains "paceline" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-paceline" (.Release.Name | trunc 31 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "paceline.image" -}}
{{- $tag := .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.image.variant) -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- with .Values.image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* Pods of one group of a role. What the schema cannot see is refused here, in words. */}}
{{- define "paceline.podsPerGroup" -}}
{{- $role := index .root.Values .role -}}
{{- if mod (int $role.ranks) (int $role.ranksPerPod) -}}
{{- fail (printf "%s: ranks (%d) is not a multiple of ranksPerPod (%d); every pod of a group holds as many ranks" .role (int $role.ranks) (int $role.ranksPerPod)) -}}
{{- end -}}
{{- div (int $role.ranks) (int $role.ranksPerPod) -}}
{{- end -}}

{{/* The StatefulSets of a role as JSON: one whose pods are whole groups, or one for each group of several pods. */}}
{{- define "paceline.sets" -}}
{{- $role := index .root.Values .role -}}
{{- $size := int (include "paceline.podsPerGroup" .) -}}
{{- $name := printf "%s-%s" (include "paceline.fullname" .root) .role -}}
{{- $sets := list -}}
{{- if eq $size 1 -}}
{{- $sets = append $sets (dict "name" $name "replicas" $role.instances "group" "") -}}
{{- else -}}
{{- range $group := until (int $role.instances) -}}
{{- $sets = append $sets (dict "name" (printf "%s-%d" $name $group) "replicas" $size "group" (toString $group)) -}}
{{- end -}}
{{- end -}}
{{- dict "sets" $sets | toJson -}}
{{- end -}}

{{- define "paceline.otherRole" -}}{{ ternary "decode" "prefill" (eq . "prefill") }}{{- end -}}

{{- define "paceline.secured" -}}{{ if ne .Values.security.mode "off" }}yes{{ end }}{{- end -}}
