{{- /* The serveConfigV2: settings over what the chart says of its own. */ -}}
{{- define "motet.serve" -}}
{{- $values := .Values -}}
{{- $args := dict "model" $values.model "data-dir" "/var/lib/motet" "log-format" "json" "router-resource" (list "motet-router=1") -}}
{{- if gt (int $values.routers.replicas) 1 }}{{- $_ := set $args "routers" $values.routers.replicas }}{{- end -}}
{{- if or (gt (int $values.gangs.replicas) 1) (gt (int $values.gangs.maxReplicas) 1) -}}
{{- $_ := set $args "min-gangs" $values.gangs.replicas -}}
{{- $_ := set $args "max-gangs" $values.gangs.maxReplicas -}}
{{- end -}}
{{- if gt (int $values.tensorParallel) 1 }}{{- $_ := set $args "tensor-parallel" $values.tensorParallel }}{{- end -}}
{{- if $values.gpus -}}
{{- $_ := set $args "device" "cuda" -}}
{{- $_ := set $args "gang-num-gpus" $values.gpus -}}
{{- end -}}
{{- $resources := list -}}
{{- range $name, $amount := $values.gangs.rayResources }}{{- $resources = append $resources (printf "%s=%v" $name $amount) }}{{- end -}}
{{- if $resources }}{{- $_ := set $args "resource" $resources }}{{- end -}}
{{- $application := dict "name" "motet" "import_path" "motet.cluster.serve_application:build" "route_prefix" "/" -}}
{{- $_ := set $application "args" (merge (dict) $values.settings $args) -}}
{{- $deployments := list -}}
{{- range $name := list "router" "gang" -}}
{{- with index $values.liveSettings $name }}{{- $deployments = append $deployments (dict "name" $name "user_config" .) }}{{- end -}}
{{- end -}}
{{- if $deployments }}{{- $_ := set $application "deployments" $deployments }}{{- end -}}
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000}
applications:
  {{- toYaml (list $application) | nindent 2 }}
{{- end }}
