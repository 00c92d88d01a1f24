{{- define "rlfleet.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Beginning of all names. 40 characters leave room for what is appended. */}}
{{- define "rlfleet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "rlfleet.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "rlfleet.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rlfleet.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name must name an existing service account when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What a Deployment selects its pods by. It can never change, so it holds no version and no value of the user's. */}}
{{- define "rlfleet.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rlfleet.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "rlfleet.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "rlfleet.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rlfleet
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ include "rlfleet.userLabels" (dict "labels" . "path" "commonLabels") }}
{{- end }}
{{- end -}}

{{- define "rlfleet.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Namespaces of the operator's kinds as one argument; empty: all. */}}
{{- define "rlfleet.watched" -}}
{{- join "," .Values.watchNamespaces -}}
{{- end -}}

{{/* Where `helm test` makes its pipeline: a namespace that the operator serves. */}}
{{- define "rlfleet.testNamespace" -}}
{{- default .Release.Namespace (first .Values.watchNamespaces) -}}
{{- end -}}

{{- define "rlfleet.hookLabels" -}}
{{ include "rlfleet.labels" .context }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* An object that exists while a hook runs, and stays to be looked at when the hook fails. */}}
{{- define "rlfleet.hookAnnotations" -}}
helm.sh/hook: {{ .hook }}
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* Labels of the user's: dict "labels" values "path" their path. Ours are selectors, so nobody else sets them. */}}
{{- define "rlfleet.userLabels" -}}
{{- $path := .path -}}
{{- range $key, $_ := .labels -}}
{{- if or (hasPrefix "app.kubernetes.io/" $key) (hasPrefix "helm.sh/" $key) -}}
{{- fail (printf "%s: %s is the chart's own label; choose another" $path $key) -}}
{{- end -}}
{{- end -}}
{{- toYaml .labels -}}
{{- end -}}

{{/* Pod settings that the operator and the pods of hooks share. */}}
{{- define "rlfleet.podBasics" -}}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A pod that runs one of the chart's own short jobs: dict "context" $, "account" name, "arguments" list. */}}
{{- define "rlfleet.hookPod" -}}
{{- $ := .context -}}
serviceAccountName: {{ .account }}
automountServiceAccountToken: true
enableServiceLinks: false
restartPolicy: Never
{{ include "rlfleet.podBasics" $ }}
containers:
  - name: {{ first .arguments }}
    image: {{ include "rlfleet.image" $ }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    command: [python, -m, rlfleet.app.hooks]
    args: {{- toYaml .arguments | nindent 6 }}
    {{- with $.Values.extraEnv }}
    env: {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext: {{- toYaml $.Values.securityContext | nindent 6 }}
    resources: {{- toYaml $.Values.hooks.resources | nindent 6 }}
    terminationMessagePolicy: FallbackToLogsOnError
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      {{- with $.Values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: tmp
    emptyDir:
      sizeLimit: 64Mi
  {{- with $.Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Which physical devices ResourceClaims were given. ResourceSlices belong to no namespace. */}}
{{- define "rlfleet.slices" -}}
- apiGroups: [resource.k8s.io]
  resources: [resourceslices]
  verbs: [list]
{{- end -}}

{{/* What the operator may do in the namespaces that it serves. */}}
{{- define "rlfleet.rules" -}}
# Engine pods are created, and deleted with a UID precondition. One label of theirs is changed: rlfleet.dev/serving, of
# pools with an InferencePool router.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete, patch]
# Their status is the kubelet's but for one condition, rlfleet.dev/weights-current, of pools with a Readiness router.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [rlfleet.dev]
  resources: [rlpipelines, enginepools, syncrounds]
  verbs: [get, list, watch, patch]
# What trainers demand is theirs: never written.
- apiGroups: [rlfleet.dev]
  resources: [trainerdemands]
  verbs: [get, list, watch]
# CatchUp rounds are ordered for every pipeline (see policy.yaml).
- apiGroups: [rlfleet.dev]
  resources: [rlpipelines]
  verbs: [sync]
# Refreshes are created by trainers, CatchUps by the operator. Old rounds are removed by the history limit.
- apiGroups: [rlfleet.dev]
  resources: [syncrounds]
  verbs: [create, delete]
- apiGroups: [rlfleet.dev]
  resources: [rlpipelines/status, enginepools/status, syncrounds/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion need this on the owner.
- apiGroups: [rlfleet.dev]
  resources: [rlpipelines/finalizers, enginepools/finalizers]
  verbs: [update]
# Claims of train blocks: made, deleted with a UID precondition, never changed. The scheduler writes their status.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [list, create, delete]
# A pool's disruption budget; a rolling update evicts within every budget.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, update, delete]
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch, list]
{{- with .Values.routerKeySecrets }}
# Keys of routers (EnginePool.spec.routers[].adminKeySecretRef), for entries whose engines are gone.
- apiGroups: [""]
  resources: [secrets]
  resourceNames: {{- toYaml . | nindent 4 }}
  verbs: [get]
{{- end }}
{{- end -}}
