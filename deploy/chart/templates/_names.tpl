{{/* The name of everything in a namespace, and the label k8s-app: the release's, with "kube-proxy" in it, as the alerts expect of the job. */}}
{{- define "kubeproxy.name" -}}
{{- $release := .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- contains "kube-proxy" $release | ternary $release (printf "%s-kube-proxy-py" $release) -}}
{{- end -}}

{{/* The name of what is in no namespace: releases of two namespaces may have one name. No release has a colon in its name. */}}
{{- define "kubeproxy.clusterName" -}}
{{- include "kubeproxy.name" . -}}
{{- if ne .Release.Namespace "kube-system" }}:{{ .Release.Namespace }}{{ end -}}
{{- end -}}

{{/* The ConfigMap that is mounted. Ours has a hash of its content in its name, as that of kustomize. */}}
{{- define "kubeproxy.configMap" -}}
{{- if .Values.existingConfigMap -}}
{{- .Values.existingConfigMap -}}
{{- else -}}
{{- include "kubeproxy.name" . }}-{{ include "kubeproxy.config" . | sha256sum | trunc 10 -}}
{{- end -}}
{{- end -}}
