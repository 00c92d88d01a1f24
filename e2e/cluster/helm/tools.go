//go:build tools

// Package helm pins the chart renderer that the local cluster builds.
package helm

import _ "helm.sh/helm/v3/cmd/helm"
