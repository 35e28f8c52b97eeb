{{- /* The groups of pods that hold gangs, as JSON: `gangs`, and each of `gangGroups` over it. */ -}}
{{- define "motet.gangGroups" -}}
{{- $groups := list (merge (dict "name" "gangs") .Values.gangs) -}}
{{- range .Values.gangGroups -}}
{{- $group := mergeOverwrite (deepCopy $.Values.gangs) (deepCopy .) -}}
{{- $groups = append $groups (set $group "name" (printf "gangs-%s" .name)) -}}
{{- end -}}
{{- $groups | toJson -}}
{{- end }}

{{- /* How many gangs there are, at least and at most, as JSON: over all groups. */ -}}
{{- define "motet.gangCounts" -}}
{{- $least := 0 -}}{{- $most := 0 -}}
{{- range $group := include "motet.gangGroups" . | fromJsonArray -}}
{{- $least = add $least (int $group.replicas) -}}
{{- $most = add $most (int $group.maxReplicas) -}}
{{- end -}}
{{- dict "least" $least "most" $most | toJson -}}
{{- end }}

{{- /* What no schema can say: values that do not go together end the rendering. */ -}}
{{- define "motet.checks" -}}
{{- $values := .Values -}}
{{- $groups := include "motet.gangGroups" . | fromJsonArray -}}
{{- range $group := prepend $groups (dict "name" "routers" "replicas" $values.routers.replicas "maxReplicas" $values.routers.maxReplicas) -}}
{{- if gt (int $group.replicas) (int $group.maxReplicas) -}}
{{- fail (printf "%s: replicas, %d, is more than maxReplicas, %d" $group.name (int $group.replicas) (int $group.maxReplicas)) -}}
{{- end -}}
{{- if and (lt (int $group.replicas) (int $group.maxReplicas)) (not $values.autoscaling) -}}
{{- fail (printf "%s: maxReplicas above replicas needs autoscaling: true" $group.name) -}}
{{- end -}}
{{- end -}}
{{- if and $values.incrementalUpgrade.enabled (gt (int $values.incrementalUpgrade.stepSizePercent) (int $values.incrementalUpgrade.maxSurgePercent)) -}}
{{- fail "incrementalUpgrade: stepSizePercent is more than maxSurgePercent" -}}
{{- end -}}
{{- if not (lt (int $values.grace.drainSeconds) (int $values.grace.terminationSeconds)) -}}
{{- fail "grace: terminationSeconds must be more than drainSeconds, in which Ray lets streams end" -}}
{{- end -}}
{{- if and $values.service.loadBalancerSourceRanges (ne $values.service.type "LoadBalancer") -}}
{{- fail "service.loadBalancerSourceRanges needs service.type LoadBalancer" -}}
{{- end -}}
{{- if and $values.image.digest (not $values.head.image.digest) (eq $values.image.repository $values.head.image.repository) -}}
{{- fail "head.image.digest is needed beside image.digest: both are of one repository, and must not be of two versions" -}}
{{- end -}}
{{- if and $values.redis.username $values.redis.embedded -}}
{{- fail "redis.username is for headRecovery with a Redis that is not embedded: the embedded one has only a password" -}}
{{- end -}}
{{- range $key := list "min-gangs" "gangs" "max-gangs" "routers" -}}
{{- if hasKey $values.settings $key -}}
{{- fail (printf "settings.%s: gangs.replicas, gangs.maxReplicas and routers.replicas say it" $key) -}}
{{- end -}}
{{- end -}}
{{- end }}
