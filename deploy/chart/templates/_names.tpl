{{/* The name of all objects in a namespace, and the label k8s-app: the release's name; it contains "kube-proxy", because the alerts select the job by this word. */}}
{{- define "kubeproxy.name" -}}
{{- $release := .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- contains "kube-proxy" $release | ternary $release (printf "%s-kube-proxy-py" $release) -}}
{{- end -}}

{{/* The name of objects without a namespace. Releases in two namespaces may have the same name, so outside kube-system it ends with a colon and the namespace. No release name contains a colon. */}}
{{- define "kubeproxy.clusterName" -}}
{{- include "kubeproxy.name" . -}}
{{- if ne .Release.Namespace "kube-system" }}:{{ .Release.Namespace }}{{ end -}}
{{- end -}}

{{/* The name of the mounted ConfigMap. The name of our ConfigMap contains a hash of its content, as with kustomize. */}}
{{- define "kubeproxy.configMap" -}}
{{- if .Values.existingConfigMap -}}
{{- .Values.existingConfigMap -}}
{{- else -}}
{{- include "kubeproxy.name" . }}-{{ include "kubeproxy.config" . | sha256sum | trunc 10 -}}
{{- end -}}
{{- end -}}
