{{- /* The serveConfigV2: settings over what the chart says of its own. How many gangs and routers there are stands with
       their deployments and not in args: another number there replaces no process. */ -}}
{{- define "motet.serve" -}}
{{- $values := .Values -}}
{{- $counts := include "motet.gangCounts" . | fromJson -}}
{{- $least := int $counts.least -}}{{- $most := int $counts.most -}}
{{- $args := dict "model" $values.model "data-dir" "/var/lib/motet" "log-format" "json" "router-resource" (list "motet-router=1") -}}
{{- if eq $least 0 }}{{- $_ := set $args "min-gangs" 0 }}{{- end -}}
{{- if gt (int $values.tensorParallel) 1 }}{{- $_ := set $args "tensor-parallel" $values.tensorParallel }}{{- end -}}
{{- if $values.gpus -}}
{{- $_ := set $args "device" "cuda" -}}
{{- $_ := set $args "gang-num-gpus" $values.gpus -}}
{{- end -}}
{{- $resources := list -}}
{{- range $name, $amount := $values.gangs.rayResources }}{{- $resources = append $resources (printf "%s=%v" $name $amount) }}{{- end -}}
{{- if $resources }}{{- $_ := set $args "resource" $resources }}{{- end -}}
{{- $application := dict "name" "motet" "import_path" "motet.cluster.serve_application:build" "route_prefix" "/" -}}
{{- $args = merge (dict) $values.settings $args -}}
{{- $_ := set $application "args" $args -}}
{{- $router := dict "name" "router" "num_replicas" (int $values.routers.replicas) -}}
{{- $gang := dict "name" "gang" -}}
{{- if lt $least $most -}}
{{- $_ := set $gang "autoscaling_config" (include "motet.autoscaling" (dict "least" $least "most" $most "args" $args) | fromJson) -}}
{{- else -}}
{{- $_ := set $gang "num_replicas" $least -}}
{{- end -}}
{{- range $deployment := list $router $gang -}}
{{- with index $values.liveSettings $deployment.name }}{{- $_ := set $deployment "user_config" . }}{{- end -}}
{{- end -}}
{{- $_ := set $application "deployments" (list $router $gang) -}}
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000}
applications:
  {{- toYaml (list $application) | nindent 2 }}
{{- end }}

{{- /* Serve's autoscaling_config, as JSON. Serve takes nothing of it from args, so it is whole. */ -}}
{{- define "motet.autoscaling" -}}
{{- $policy := dict "policy_function" "motet.cluster.replicas.autoscaler:GangAutoscaler" -}}
{{- with pick .args "queued-tokens-per-gang" "max-tokens-per-step" "pool-pressure" "scale-down-after" "scale-to-zero-after" "tenant-scaling-share" "scaling-window" "cold-start-wait" }}{{- $_ := set $policy "policy_kwargs" (dict "settings" .) }}{{- end -}}
{{- $window := get .args "scaling-window" | default 5 -}}
{{- $config := dict "min_replicas" .least "max_replicas" .most "upscale_delay_s" 0 "downscale_delay_s" 0 "downscale_to_zero_delay_s" 0 "look_back_period_s" $window "metrics_interval_s" (divf $window 5) -}}
{{- if eq .least 0 }}{{- $_ := set $config "initial_replicas" 1 }}{{- end -}}
{{- $_ := set $config "policy" $policy -}}
{{- $config | toJson -}}
{{- end }}
