{{- define "motet.labels" -}}
app.kubernetes.io/name: motet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Of the RayService and the Service, and before the names of all others. */ -}}
{{- define "motet.name" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- define "motet.redisLabels" -}}
app.kubernetes.io/name: motet-redis
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "motet.podSecurity" -}}
{{- $ours := dict "runAsNonRoot" true "runAsUser" 1000 "runAsGroup" 1000 "fsGroup" 1000 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- mergeOverwrite $ours (deepCopy .Values.podSecurityContext) | toYaml }}
{{- end }}

{{- define "motet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* "yes" if settings need servers outside of the cluster, which no network policy opens by itself. */ -}}
{{- define "motet.outside" -}}
{{- if or (hasKey .Values.settings "oidc-issuers") (not (hasPrefix "/" .Values.model)) }}yes{{ end -}}
{{- end }}
