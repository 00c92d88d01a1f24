"""Which resources the operator talks about, and where the apiserver serves them.

Invariant: a path is built only here, and every name and namespace in it is percent-encoded, so no text from an
object can reach another path.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

GROUP = "rlfleet.dev"
VERSION = "v1alpha1"


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource kind as the API serves it; ``group`` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """``apiVersion`` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path of the collection, of one object, or of a subresource.

        ``namespace`` None lists all namespaces. Raises ValueError where a namespaced object would be named without
        its namespace, or a name is empty: the path would silently mean the whole collection.
        """
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace is not None:
            if not namespace:
                raise ValueError(f"{self.plural}: empty namespace")
            parts += ["namespaces", quote(namespace, safe="")]
        elif self.namespaced and name is not None:
            raise ValueError(f"{self.plural} are namespaced: an object needs its namespace")
        parts.append(self.plural)
        if name is not None:
            if not name:
                raise ValueError(f"{self.plural}: empty name")
            parts.append(quote(name, safe=""))
            if subresource:
                parts.append(subresource)
        return "/" + "/".join(parts)


PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")
RESOURCECLAIMS = Resource("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim")
RESOURCESLICES = Resource("resource.k8s.io", "v1", "resourceslices", "ResourceSlice", namespaced=False)
#: Known by name for metrics alone; what is read is the document below.
OPENAPI = Resource("", "v3", "openapi", "OpenAPI", namespaced=False)
#: The schemas of our kinds as the apiserver publishes them. Every authenticated user may read it.
OPENAPI_PATH = f"/openapi/v3/apis/{GROUP}/{VERSION}"
PODDISRUPTIONBUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
RLPIPELINES = Resource(GROUP, VERSION, "rlpipelines", "RLPipeline")
ENGINEPOOLS = Resource(GROUP, VERSION, "enginepools", "EnginePool")
SYNCROUNDS = Resource(GROUP, VERSION, "syncrounds", "SyncRound")
TRAINERDEMANDS = Resource(GROUP, VERSION, "trainerdemands", "TrainerDemand")
