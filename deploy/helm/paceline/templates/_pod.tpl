{{/* What the pods of all parts have in common, and the pod of an instance. */}}

{{- define "paceline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "paceline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if .rdma }}
  # Registered memory must be lockable.
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* The model and the secrets: where they come from, and where each part sees them. */}}
{{- define "paceline.sharedVolumes" -}}
{{- with .Values.model.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- if eq .Values.security.mode "secret" }}
- name: secrets
  secret: {secretName: {{ .Values.security.secretName }}, defaultMode: 0440}
{{- else if eq .Values.security.mode "certManager" }}
- name: secrets
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "paceline.fullname" . }}-tls
          items:
            - {key: ca.crt, path: ca.crt}
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
      - secret:
          name: {{ .Values.security.secretName }}
          items:
            - {key: curve.key, path: curve.key}
            - {key: shared.key, path: shared.key}
{{- end }}
{{- end -}}

{{- define "paceline.sharedMounts" -}}
{{- if .Values.model.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if include "paceline.secured" . }}
- {name: secrets, mountPath: /etc/paceline/secrets, readOnly: true}
{{- end }}
{{- end -}}

{{- define "paceline.sharedEnv" -}}
{{- if include "paceline.secured" . }}
- {name: PACELINE_SECRETS, value: /etc/paceline/secrets}
{{- end }}
- {name: PACELINE_RUN_DIR, value: /run/paceline}
- {name: HOME, value: /tmp}
{{- end -}}

{{/* In: root, role, labels (of this group). Out: metadata and spec of a pod that holds ranks. */}}
{{- define "paceline.instancePod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $role := index $values .role -}}
{{- $rdma := eq $values.transport "rdma" -}}
{{- $hugepages := and $rdma $values.rdma.hugepages -}}
{{- $fullname := include "paceline.fullname" $root -}}
metadata:
  labels:
    {{- include "paceline.labels" (dict "root" $root "component" .role) | nindent 4 }}
    {{- with .group }}
    paceline/group: {{ . | quote }}
    {{- end }}
    {{- with $role.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .role }}
    {{- with $role.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ $fullname }}-{{ .role }}
  automountServiceAccountToken: false
  # Variables of services would be called PACELINE_…, as those that we read.
  enableServiceLinks: false
  # SIGTERM drains; the rest is for what ends the ranks afterwards.
  terminationGracePeriodSeconds: {{ add $role.drainSeconds 20 }}
  {{- if and $rdma $values.rdma.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $role.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $role.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $role.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.tolerations }}
  tolerations: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- include "paceline.placement" . | nindent 2 }}
  securityContext:
    {{- include "paceline.podSecurity" $root | nindent 4 }}
    {{- if not (and $rdma $values.rdma.hostNetwork) }}
    # Peer link and KV transfer take any free port: out of the range that the network policies name.
    sysctls:
      - name: net.ipv4.ip_local_port_range
        value: {{ printf "%d %d" (int $values.ports.ranks.from) (int $values.ports.ranks.to) | quote }}
    {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "paceline.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        {{- include "paceline.instanceArguments" . | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: PACELINE_PORT, value: {{ $values.ports.grpc | quote }}}
        {{- if eq $values.groups "statefulset" }}
        - {name: PACELINE_GROUP_SIZE, value: {{ include "paceline.podsPerGroup" . | quote }}}
        - {name: PACELINE_HEADLESS, value: {{ printf "%s-%s.%s.svc" $fullname .role $root.Release.Namespace }}}
        {{- end }}
        {{- include "paceline.sharedEnv" $root | nindent 8 }}
        {{- with $role.env }}{{ toYaml . | nindent 8 }}{{ end }}
      ports:
        - {name: grpc, protocol: TCP, containerPort: {{ $values.ports.grpc }}}
        - {name: metrics, protocol: TCP, containerPort: {{ $values.ports.metrics }}}
      {{- include "paceline.instanceProbes" . | nindent 6 }}
      resources:
        requests:
          {{- toYaml $role.resources.requests | nindent 10 }}
          {{- include "paceline.devices" . | nindent 10 }}
        limits:
          {{- toYaml $role.resources.limits | nindent 10 }}
          {{- include "paceline.devices" . | nindent 10 }}
      securityContext:
        {{- include "paceline.containerSecurity" (dict "rdma" $rdma) | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: run, mountPath: /run/paceline}
        - {name: shm, mountPath: /dev/shm}
        {{- if $hugepages }}
        - {name: hugepages, mountPath: /hugepages}
        {{- end }}
        {{- include "paceline.sharedMounts" $root | nindent 8 }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $role.tmpSize }}}
    - name: run
      emptyDir: {sizeLimit: {{ $role.runSize }}}
    # Hidden states between ranks of one pod; counts as the pod's memory.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $role.shmSize }}}
    {{- if $hugepages }}
    - name: hugepages
      emptyDir: {medium: HugePages}
    {{- end }}
    {{- include "paceline.sharedVolumes" $root | nindent 4 }}
{{- end -}}

{{- define "paceline.devices" -}}
{{- $values := .root.Values -}}
{{- $role := index $values .role -}}
{{- with $role.gpusPerRank }}
nvidia.com/gpu: {{ mul . $role.ranksPerPod }}
{{- end }}
{{- if eq $values.transport "rdma" }}
{{ $values.rdma.resource }}: {{ $values.rdma.count }}
{{- with $values.rdma.hugepages }}
hugepages-2Mi: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Groups apart from each other, pods of one group near each other. */}}
{{- define "paceline.placement" -}}
{{- $role := index .root.Values .role -}}
{{- $affinity := deepCopy $role.affinity -}}
{{- if and $role.nearKey .group (not (hasKey $affinity "podAffinity")) -}}
{{- $labels := merge (dict "paceline/group" .group) (include "paceline.selector" (dict "root" .root "component" .role) | fromYaml) -}}
{{- $term := dict "labelSelector" (dict "matchLabels" $labels) "topologyKey" $role.nearKey -}}
{{- $_ := set $affinity "podAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term))) -}}
{{- end -}}
{{- with $affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $role.spreadKey }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "paceline.selector" (dict "root" .root "component" .role) | nindent 8 }}
{{- end -}}

{{- define "paceline.instanceArguments" -}}
{{- $values := .root.Values -}}
{{- $role := index $values .role -}}
- {{ .role }}
- --listen=0.0.0.0:{{ $values.ports.grpc }}
- --pp={{ $role.ranks }}
{{- with $role.layers }}
- --layers={{ . }}
{{- end }}
- --model={{ $values.model.path }}
{{- with $values.model.name }}
- --model-name={{ . }}
{{- end }}
{{- if gt (int (include "paceline.podsPerGroup" .)) 1 }}
- --ring-ports={{ $values.ports.ring }}
{{- end }}
- --gateway={{ include "paceline.fullname" .root }}-registry.{{ .root.Release.Namespace }}.svc:{{ $values.ports.registry }}
- --metrics=0.0.0.0:{{ $values.ports.metrics }}
- --dtype={{ $values.engine.dtype }}
- --page-size={{ $values.engine.pageSize }}
- --max-model-len={{ $values.engine.maxModelLen }}
- --kv-memory={{ $role.kvMemory }}
- --host-memory={{ $role.hostMemory }}
- --transfer-backend={{ $values.engine.transferBackend }}
- --checksum={{ $values.engine.checksum }}
{{- if and (eq $values.transport "rdma") $values.rdma.devices }}
- --transfer-device={{ $values.rdma.devices }}
{{- end }}
- --drain-timeout={{ $role.drainSeconds }}
- --load-timeout={{ $role.loadSeconds }}
{{- if not (include "paceline.secured" .root) }}
- --insecure
{{- end }}
{{- range $role.args }}
- {{ . | quote }}
{{- end }}
{{- end -}}
