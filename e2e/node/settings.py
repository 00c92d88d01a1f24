"""Configuration files of the node's programs: containerd, CNI, kubelet, kube-proxy, CoreDNS."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.node.host import Network

#: The name that kind gives the node of a cluster called rlfleet: manifests fit both.
NODE_NAME = "rlfleet-control-plane"
PAUSE_IMAGE = "localhost/rlfleet/pause:1"
CLUSTER_DOMAIN = "cluster.local"
KUBELET_PORT = 10250
DNS_READY_PORT = 8181


@dataclass(frozen=True)
class Places:
    """Where one node keeps its things. ``images``: containerd's store, which may outlive the node."""

    state: Path
    sockets: Path
    images: Path
    network: Network
    cgroup: str

    @property
    def containerd(self) -> Path:
        """containerd's socket."""
        return self.sockets / "containerd.sock"

    @property
    def kubelet(self) -> Path:
        """kubelet's root folder: volumes of pods."""
        return self.state / "kubelet"

    @property
    def pod_network(self) -> str:
        """Name of the CNI network, this node's own."""
        return f"rlfleet-{self.cgroup[-8:]}"


def containerd_config(places: Places) -> str:
    """containerd's own file format. A machine may lack the capability to lower the OOM score."""
    return f"""version = 2
root = "{places.images}"
state = "{places.state}/containerd/state"
[grpc]
  address = "{places.containerd}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{places.state}/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{places.state}/cni"
"""


def cni_config(places: Places) -> str:
    """A bridge in the node's namespace; addresses come from a file of the node's own."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(places.state / "addresses"),
            "ranges": [[{"subnet": places.network.pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
    return json.dumps({"cniVersion": "0.4.0", "name": places.pod_network, "plugins": plugins})


def kubelet_config(places: Places) -> str:
    """Real authentication and authorization: the apiserver comes with a certificate, others are asked about there."""
    pki = places.state / "pki"
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": places.network.address,
        "port": KUBELET_PORT,
        "tlsCertFile": str(pki / "kubelet-serving.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet-serving.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{places.cgroup}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "failCgroupV1": False,
        "containerRuntimeEndpoint": f"unix://{places.containerd}",
        # Images are imported, never pulled: one that is collected does not come back.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi"},
        "healthzBindAddress": places.network.address,
        "resolvConf": "",
        "clusterDNS": [places.network.address],
        "clusterDomain": CLUSTER_DOMAIN,
        "podLogsDir": str(places.state / "pod-logs"),
        "volumePluginDir": str(places.state / "volume-plugins"),
        "nodeStatusUpdateFrequency": "4s",
        # How soon a volume that is too full is seen.
        "volumeStatsAggPeriod": "5s",
    }
    return yaml.safe_dump(config)


def proxy_config(places: Places, kubeconfig: Path) -> str:
    """iptables mode. The conntrack limits belong to the machine: left as they are."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "mode": "iptables",
        "clusterCIDR": places.network.pods,
        "hostnameOverride": NODE_NAME,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
    return yaml.safe_dump(config)


def corefile(places: Places, kubeconfig: Path) -> str:
    """Names of Services and pods; a name outside the cluster is unknown, as nothing outside can be reached."""
    return f"""{CLUSTER_DOMAIN}:53 {{
    errors
    ready {places.network.address}:{DNS_READY_PORT}
    kubernetes {CLUSTER_DOMAIN} {{
        kubeconfig {kubeconfig}
        ttl 5
    }}
}}
"""
