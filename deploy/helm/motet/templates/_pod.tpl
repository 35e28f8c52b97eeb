{{- /* A pod of Ray. Takes root, component, container, account, resources, and what only some have: ports, probes. */ -}}
{{- define "motet.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- if kindIs "invalid" $values.trustedProxies }}
{{- fail "trustedProxies is needed: the networks of your ingress or load balancer, such as [10.0.0.0/8], or [] where clients come by their own addresses (docs/scaling/clusters.md)" }}
{{- end -}}
metadata:
  labels:
    {{- include "motet.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  serviceAccountName: {{ .account }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if $values.autoscaling }}
  restartPolicy: Never
  {{- end }}
  terminationGracePeriodSeconds: 720
  securityContext:
    {{- include "motet.podSecurity" $root | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .spread }}
  topologySpreadConstraints:
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
  {{- if $values.logShipper }}
  initContainers:
    - name: log-shipper
      image: docker.io/fluent/fluent-bit:4.0
      imagePullPolicy: IfNotPresent
      restartPolicy: Always
      args: [--config, /etc/log-shipper/fluent-bit.yaml]
      resources:
        requests: {cpu: 50m, memory: 64Mi, ephemeral-storage: 64Mi}
        limits: {cpu: 500m, memory: 256Mi, ephemeral-storage: 256Mi}
      securityContext:
        {{- include "motet.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: log-shipper, mountPath: /etc/log-shipper, readOnly: true}
        - {name: log-positions, mountPath: /var/log-shipper}
        - {name: ray-logs, mountPath: /tmp/ray, readOnly: true}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: "{{ $values.image.repository }}:{{ $values.image.tag }}"
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
        - {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: "660"}
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
        {{- range $name, $value := $values.environment }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      {{- with .probes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      securityContext:
        {{- include "motet.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: ray-logs, mountPath: /tmp/ray}
        - {name: shared-mem, mountPath: /dev/shm}
        - {name: cache, mountPath: /var/cache}
        - {name: secrets, mountPath: /etc/motet/secrets, readOnly: true}
        - {name: store, mountPath: /var/lib/motet}
        {{- if $values.models.enabled }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {sizeLimit: 4Gi}}
    - {name: ray-logs, emptyDir: {sizeLimit: 4Gi}}
    - {name: shared-mem, emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory | default "512Mi" }}}}
    - {name: cache, emptyDir: {sizeLimit: 2Gi}}
    - {name: secrets, secret: {secretName: {{ $values.secretName }}, defaultMode: 0400}}
    - {name: store, persistentVolumeClaim: {claimName: {{ $root.Release.Name }}-store}}
    {{- if $values.models.enabled }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $root.Release.Name }}-models, readOnly: true}}
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
    {{- if $values.logShipper }}
    - {name: log-shipper, configMap: {name: {{ $root.Release.Name }}-log-shipper}}
    - {name: log-positions, emptyDir: {sizeLimit: 64Mi}}
    {{- end }}
{{- end }}
