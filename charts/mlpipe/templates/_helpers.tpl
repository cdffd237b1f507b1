{{- define "mlpipe.namespace" -}}
{{ .Values.namespace.name | default .Release.Namespace }}
{{- end }}

{{- define "mlpipe.labels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . }}
{{ end -}}
app.kubernetes.io/name: mlpipe
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: mlpipe
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* The labels that mlpipe puts on every pod it makes. */ -}}
{{- define "mlpipe.podLabels" -}}
app.kubernetes.io/managed-by: mlpipe
{{- end }}

{{- /* The name that mlpipe gives the metrics port of a local rank. */ -}}
{{- define "mlpipe.port" -}}
metrics{{ if . }}-{{ . }}{{ end }}
{{- end }}

{{- /* A text or a whole number as a text. Helm reads numbers as floats, of which `quote` makes 1.2e+06. */ -}}
{{- define "mlpipe.amount" -}}
{{ if kindIs "string" . }}{{ . | quote }}{{ else }}{{ int64 . | quote }}{{ end }}
{{- end }}

{{- /* The network bits of a CIDR behind its family, as a text: 10.0.0.0/8 -> 4:00001010. One range lies in another when its
     text begins with the other's. */ -}}
{{- define "mlpipe.networkBits" -}}
{{- $address := splitList "/" . | first -}}
{{- $length := splitList "/" . | last | int -}}
{{- $groups := splitList "." $address -}}
{{- $family := dict "name" "4" "groups" 4 "width" 8 "base" "" -}}
{{- if contains ":" $address -}}
{{- $family = dict "name" "6" "groups" 8 "width" 16 "base" "0x" -}}
{{- $groups = splitList "::" $address | first | splitList ":" | compact -}}
{{- if contains "::" $address -}}
{{- $end := splitList "::" $address | last | splitList ":" | compact -}}
{{- range untilStep (add (len $groups) (len $end) | int) 8 1 }}{{ $groups = append $groups "0" }}{{ end -}}
{{- $groups = concat $groups $end -}}
{{- end -}}
{{- end -}}
{{- $bits := "" -}}
{{- range $groups }}{{ $bits = printf "%s%0*b" $bits $family.width (printf "%s%s" $family.base . | int64) }}{{ end -}}
{{- if or (ne (len $groups) $family.groups) (ne (len $bits) (mul $family.groups $family.width | int)) (gt $length (len $bits)) -}}
{{- fail (printf "%s is no range of addresses such as 10.0.0.0/8 or 2001:db8::/32" .) -}}
{{- end -}}
{{ $family.name }}:{{ trunc $length $bits }}
{{- end }}

{{- /* A range without what lies in it of link-local addresses and of the clouds' metadata services (AWS, Google, Azure,
     Oracle: 169.254.0.0/16; fd00:ec2::254 is AWS's, fd20:ce::254 Google's, 100.100.100.200 Alibaba's), which hand out the
     node's identity. An exception must be smaller than its range; a range within one is refused. */ -}}
{{- define "mlpipe.ipBlock" -}}
{{- $range := . -}}
{{- $own := include "mlpipe.networkBits" . -}}
{{- $except := list -}}
{{- range list "169.254.0.0/16" "100.100.100.200/32" "fe80::/10" "fd00:ec2::254/128" "fd20:ce::254/128" -}}
{{- $theirs := include "mlpipe.networkBits" . -}}
{{- if hasPrefix $theirs $own -}}
{{- fail (printf "networkPolicy.egress.cidrs: %s lies in %s, link-local addresses or a cloud's metadata service, which hands out the node's identity" $range .) -}}
{{- else if hasPrefix $own $theirs -}}
{{- $except = append $except . -}}
{{- end -}}
{{- end -}}
cidr: {{ $range | quote }}
{{- if $except }}
except: {{ $except | toJson }}
{{- end }}
{{- end }}

{{- /* Fails with a remedy when a flag is on and its CRD is not there: dict "root" $ "flag" "..." "api" "..." "from" "..." */ -}}
{{- define "mlpipe.needs" -}}
{{- if not (.root.Capabilities.APIVersions.Has .api) }}
{{- fail (printf "%s is true, but this cluster has no %s: install %s first, or set %s=false (offline: helm template --api-versions %s)" .flag .api .from .flag .api) }}
{{- end }}
{{- end }}

{{- /* The text with the address of the runbooks put before each of their paths: dict "root" $ "text" "..." */ -}}
{{- define "mlpipe.runbooks" -}}
{{- with .root.Values.runbooks.baseUrl -}}
{{ replace "docs/runbooks/" (printf "%s/" (trimSuffix "/" .)) $.text }}
{{- else -}}
{{ .text }}
{{- end }}
{{- end }}
