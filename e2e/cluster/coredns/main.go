// Package main is CoreDNS with just the plugins that the DNS of one node needs, which spares the build the clients of
// several clouds.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func main() {
	// The order of the chain is compiled in.
	dnsserver.Directives = []string{"ready", "errors", "kubernetes"}
	coremain.Run()
}
