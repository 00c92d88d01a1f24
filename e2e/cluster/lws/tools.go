//go:build tools

// Package lws pins the controller of LeaderWorkerSets that a scenario builds and runs.
package lws

import _ "sigs.k8s.io/lws/cmd"
