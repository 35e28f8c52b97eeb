{{- /* A pod of Ray. Takes root, component, container, account, image and group, the group's values; and what only some have:
       ports, probes, spread, hasData (the volumes of adapters and of the base). */ -}}
{{- define "motet.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $group := .group -}}
{{- $volumes := concat $values.volumes (default (list) $group.volumes) -}}
{{- $mounts := concat $values.volumeMounts (default (list) $group.volumeMounts) -}}
{{- if kindIs "invalid" $values.trustedProxies }}
{{- fail "trustedProxies is needed: the networks of your ingress or load balancer, such as [10.0.0.0/8], or [] where clients come by their own addresses (docs/scaling/clusters.md)" }}
{{- end -}}
metadata:
  labels:
    {{- include "motet.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with merge (dict) (default (dict) $group.labels) $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with merge (dict) (default (dict) $group.annotations) $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ .account }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if $values.autoscaling }}
  restartPolicy: Never
  {{- end }}
  terminationGracePeriodSeconds: {{ $values.grace.terminationSeconds }}
  securityContext:
    {{- include "motet.podSecurity" $root | nindent 4 }}
  {{- include "motet.pullSecrets" $root | nindent 2 }}
  {{- include "motet.placement" $group | nindent 2 }}
  {{- if or .spread $group.topologySpreadConstraints }}
  topologySpreadConstraints:
  {{- with .spread }}
    - maxSkew: 1
      topologyKey: topology.kubernetes.io/zone
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: &alike-{{ $.component }}
        matchLabels:
          {{- include "motet.labels" $root | nindent 10 }}
          app.kubernetes.io/component: {{ $.component }}
      matchLabelKeys: [ray.io/cluster]
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: {{ . }}
      labelSelector: *alike-{{ $.component }}
      matchLabelKeys: [ray.io/cluster]
  {{- end }}
  {{- with $group.topologySpreadConstraints }}
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- $starters := concat $values.initContainers (default (list) $group.initContainers) }}
  {{- if or $values.logShipper.enabled $starters }}
  initContainers:
  {{- end }}
  {{- if $values.logShipper.enabled }}
    - name: log-shipper
      image: {{ $values.logShipper.image }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      restartPolicy: Always
      args: [--config, /etc/log-shipper/fluent-bit.yaml]
      resources:
        {{- toYaml $values.logShipper.resources | nindent 8 }}
      securityContext:
        {{- include "motet.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: log-shipper, mountPath: /etc/log-shipper, readOnly: true}
        - {name: log-positions, mountPath: /var/log-shipper}
        - {name: ray-logs, mountPath: /tmp/ray, readOnly: true}
  {{- end }}
  {{- with $starters }}
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ .image | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      ports:
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      env:
        - {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
        - {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
        - {name: RAY_SERVE_DEFAULT_HTTP_HOST, value: 0.0.0.0}
        - {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: "86400"}
        - {name: RAY_SERVE_PORT_QUARANTINE_S, value: "150"}
        - {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "5"}
        - {name: RAY_SERVE_HAPROXY_METRICS_ENABLED, value: "0"}
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ $values.grace.drainSeconds | quote }}}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        - {name: RAY_worker_niceness, value: "0"}
        - {name: RAY_gcs_server_request_timeout_seconds, value: "120"}
        - {name: RAY_ROTATION_MAX_BYTES, value: "67108864"}
        - {name: RAY_ROTATION_BACKUP_COUNT, value: "1"}
        - {name: GLIBC_TUNABLES, value: glibc.malloc.hugetlb=1}
        - {name: MOTET_SECRETS_DIR, value: /etc/motet/secrets}
        - {name: HOME, value: /tmp}
        - {name: XDG_CACHE_HOME, value: /var/cache}
        {{- with $values.trustedProxies }}
        - {name: MOTET_TRUSTED_PROXIES, value: {{ join "," . | quote }}}
        {{- end }}
        {{- range $name, $value := merge (dict) (default (dict) $group.environment) $values.environment }}
        {{- if kindIs "string" $value }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- else }}
        - {name: {{ $name }}, valueFrom: {{ $value.valueFrom | default $value | toJson }}}
        {{- end }}
        {{- end }}
      {{- with .probes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      resources:
        {{- toYaml $group.resources | nindent 8 }}
      securityContext:
        {{- include "motet.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: ray-logs, mountPath: /tmp/ray}
        - {name: shared-mem, mountPath: /dev/shm}
        - {name: cache, mountPath: /var/cache}
        - {name: secrets, mountPath: /etc/motet/secrets, readOnly: true}
        {{- if .hasData }}
        - {name: store, mountPath: /var/lib/motet}
        {{- if $values.models.enabled }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- end }}
        {{- with $mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {sizeLimit: 4Gi}}
    - {name: ray-logs, emptyDir: {sizeLimit: 4Gi}}
    - {name: shared-mem, emptyDir: {medium: Memory, sizeLimit: {{ $group.sharedMemory | default "512Mi" }}}}
    - {name: cache, emptyDir: {sizeLimit: 2Gi}}
    - {name: secrets, secret: {secretName: {{ $values.secretName }}, defaultMode: 0400}}
    {{- if .hasData }}
    - {name: store, persistentVolumeClaim: {claimName: {{ $values.store.existingClaim | default (printf "%s-store" (include "motet.name" $root)) }}}}
    {{- if $values.models.enabled }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $values.models.existingClaim | default (printf "%s-models" (include "motet.name" $root)) }}, readOnly: true}}
    {{- end }}
    {{- end }}
    {{- if and $values.autoscaling (eq .component "head") }}
    - {name: autoscaler-tmp, emptyDir: {sizeLimit: 512Mi}}
    - name: api-token
      projected:
        defaultMode: 0400
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3607}
          - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
          - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
    {{- end }}
    {{- if $values.logShipper.enabled }}
    - {name: log-shipper, configMap: {name: {{ include "motet.name" $root }}-log-shipper}}
    - {name: log-positions, emptyDir: {sizeLimit: 64Mi}}
    {{- end }}
    {{- with $volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* An image by its digest, if that is given, else by its tag. */ -}}
{{- define "motet.image" -}}
{{ .repository }}{{ with .digest }}@{{ . }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{- /* Where a pod may run and how it ranks, from the values of its group. */ -}}
{{- define "motet.placement" -}}
{{- range $key := list "nodeSelector" "affinity" "tolerations" "runtimeClassName" "priorityClassName" }}
{{- with index $ $key }}
{{ toYaml (dict $key .) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "motet.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
