{{- define "rlfleet.serviceAccountName" -}}
{{- default .Release.Name .Values.serviceAccount.name -}}
{{- end -}}

{{- define "rlfleet.labels" -}}
app.kubernetes.io/name: rlfleet
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Which physical devices ResourceClaims were given. ResourceSlices belong to no namespace. */}}
{{- define "rlfleet.slices" -}}
- apiGroups: [resource.k8s.io]
  resources: [resourceslices]
  verbs: [list]
{{- end -}}

{{/* What the operator may do in the namespaces that it serves. */}}
{{- define "rlfleet.rules" -}}
# Engine pods are created, and deleted with a UID precondition. Their status is the kubelet's: never written.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rlfleet.dev]
  resources: [rlpipelines, enginepools, syncrounds]
  verbs: [get, list, watch, patch, update]
# What trainers demand is theirs: never written.
- apiGroups: [rlfleet.dev]
  resources: [trainerdemands]
  verbs: [get, list, watch]
# Refreshes are created by trainers, CatchUps by the operator. Old rounds are removed by the history limit.
- apiGroups: [rlfleet.dev]
  resources: [syncrounds]
  verbs: [create, delete]
- apiGroups: [rlfleet.dev]
  resources: [rlpipelines/status, enginepools/status, syncrounds/status]
  verbs: [patch, update]
# Owner references with blockOwnerDeletion need this on the owner.
- apiGroups: [rlfleet.dev]
  resources: [rlpipelines/finalizers, enginepools/finalizers, syncrounds/finalizers]
  verbs: [update]
# Claims of train blocks: made, deleted with a UID precondition, never changed. The scheduler writes their status.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [list, create, delete]
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
