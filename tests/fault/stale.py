"""An apiserver that has fallen behind: what it answered at one moment, answered again later.

Real ones do that for reads from a watch cache (resourceVersion 0), and a client that is thrown from one replica to
another can go back in time. The operator asks for neither, so this is more than it will meet; it must be safe all the
same, because every write says which state it was decided on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from e2e.cluster.local import LocalCluster
from tests.fault.history import KINDS


class Snapshot:
    """All objects of one kind in a namespace, as they are when it is taken."""

    def __init__(self, cluster: LocalCluster, namespace: str, plural: str) -> None:
        api, _, _ = KINDS[plural].rpartition("/")
        listed = cluster.read(f"{api}/namespaces/{namespace}/{plural}")
        self.plural = plural
        self.version = str(listed["metadata"]["resourceVersion"])
        self._head = {"kind": listed["kind"], "apiVersion": listed["apiVersion"]}
        self._objects = {str(o["metadata"]["name"]): o for o in listed["items"]}

    def answer(self, path: str, query: Mapping[str, str]) -> tuple[int, Any]:
        """(status, body) of a GET of the kind, or of one of its objects."""
        name = path.rpartition(f"/{self.plural}")[2].strip("/").partition("/")[0]
        if not name:
            items = [o for o in self._objects.values() if _selected(o, query.get("labelSelector", ""))]
            return 200, {**self._head, "metadata": {"resourceVersion": self.version}, "items": items}
        if name in self._objects:
            return 200, self._objects[name]
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        return 404, status | {"message": f"{self.plural} {name!r} not found"}


def _selected(obj: dict[str, Any], selector: str) -> bool:
    """Whether its labels match; ``a``, ``a=b`` and ``a==b``, joined by commas."""
    found = obj["metadata"].get("labels") or {}
    for part in filter(None, selector.split(",")):
        key, given, value = part.replace("==", "=").partition("=")
        if key not in found or (given and found[key] != value):
            return False
    return True
