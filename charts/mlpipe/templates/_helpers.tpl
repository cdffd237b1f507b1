{{- define "mlpipe.namespace" -}}
{{ .Values.namespace.name | default .Release.Namespace }}
{{- end }}

{{- define "mlpipe.labels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . }}
{{ end -}}
app.kubernetes.io/name: mlpipe
app.kubernetes.io/instance: {{ .Release.Name }}
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
