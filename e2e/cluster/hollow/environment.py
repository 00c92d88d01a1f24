"""A container's environment and command line from its pod spec: references, $(VAR) expansion, mount paths.

Order and precedence are the kubelet's: ``envFrom``, then ``env``, each value expanded with the variables before it,
then ``command`` and ``args`` with all of them. Afterwards each path of a mounted volume is replaced by the host
directory that stands for the volume, since these containers have no file system of their own.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from e2e.cluster.hollow import quantity

Object = dict[str, Any]
# ("configmaps" | "secrets", name) -> its data, or None when it does not exist.
Fetch = Callable[[str, str], Awaitable[Object | None]]

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.\-]*)\)")


class ConfigError(Exception):
    """The container cannot be created yet (reason CreateContainerConfigError): something it refers to is missing."""


@dataclass(frozen=True)
class PodFacts:
    """What the downward API tells beside the pod object itself."""

    pod_ip: str
    host_ip: str
    node_allocatable: Mapping[str, str]


async def environment(pod: Object, container: Object, facts: PodFacts, fetch: Fetch) -> dict[str, str]:
    """The variables that the spec gives, expanded. Raises ConfigError."""
    result: dict[str, str] = {}
    for source in container.get("envFrom", []):
        prefix = source.get("prefix", "")
        for kind, field in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
            if field in source:
                data = await read_source(kind, source[field], fetch)
                result.update({prefix + key: value.decode() for key, value in data.items()})
    for variable in container.get("env", []):
        name = variable["name"]
        if "valueFrom" not in variable:
            result[name] = expand(variable.get("value", ""), result)
            continue
        value = await _reference(pod, container, variable["valueFrom"], facts, fetch)
        if value is not None:
            result[name] = value
    return result


def command_line(container: Object, variables: Mapping[str, str]) -> list[str]:
    """``command`` and ``args``, expanded. Raises ConfigError without a command: there is no image to take it from."""
    if not container.get("command"):
        raise ConfigError("hollow nodes run no image: the container needs a command")
    return [expand(word, variables) for word in [*container["command"], *container.get("args", [])]]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $(NAME) of known variables; unknown ones stay as they are, and $$ is a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        return variables.get(match.group(1), match.group(0))

    return _REFERENCE.sub(replace, text)


class MountPaths:
    """Replaces mount paths by host directories wherever they stand as a path of their own in a text."""

    def __init__(self, mounts: Mapping[str, str]) -> None:
        # The longest first: a volume may be mounted below another. One pass: a host directory is not looked at again.
        self._mounts = {path.rstrip("/"): host for path, host in mounts.items() if path.rstrip("/")}
        paths = "|".join(re.escape(path) for path in sorted(self._mounts, key=len, reverse=True))
        # Not in the middle of a longer path or word; after "://" a path begins again.
        self._pattern = re.compile(rf"(?:(?<![\w.\-/])|(?<=://))(?:{paths})(?![\w.\-])") if paths else None

    def replace(self, text: str) -> str:
        """The text with host directories."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._mounts[match.group(0)], text)


async def read_source(kind: str, reference: Object, fetch: Fetch) -> dict[str, bytes]:
    """All keys of a ConfigMap or Secret; empty for a missing optional one. Raises ConfigError for a missing one."""
    found = await fetch(kind, reference["name"])
    if found is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f'{kind.removesuffix("s")} "{reference["name"]}" not found')
    data = {key: value.encode() for key, value in (found.get("data") or {}).items()}
    if kind == "secrets":
        return {key: base64.b64decode(value) for key, value in data.items()}
    return data | {key: base64.b64decode(value) for key, value in (found.get("binaryData") or {}).items()}


def field(pod: Object, path: str, facts: PodFacts) -> str:
    """A field of the downward API. Raises ConfigError for one that it does not have."""
    metadata, spec = pod["metadata"], pod["spec"]
    match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if match:
        return str((metadata.get(match.group(1)) or {}).get(match.group(2), ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.removeprefix("metadata.")) or {}
        return "\n".join(f'{key}="{value}"' for key, value in sorted(entries.items()))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec["nodeName"],
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.podIP": facts.pod_ip,
        "status.podIPs": facts.pod_ip,
        "status.hostIP": facts.host_ip,
        "status.hostIPs": facts.host_ip,
    }
    if path not in values:
        raise ConfigError(f"unsupported fieldRef {path}")
    return str(values[path])


def resource(pod: Object, container: Object, reference: Object, facts: PodFacts) -> str:
    """A container's limit or request; an absent limit of cpu or memory reads as what the node can give."""
    name = reference.get("containerName")
    if name:
        everyone = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        container = next(c for c in everyone if c["name"] == name)
    side, _, key = reference["resource"].partition(".")
    resources = container.get("resources", {})
    amount = resources.get(side, {}).get(key)
    if amount is None and side == "limits":
        amount = facts.node_allocatable.get(key)
    return str(quantity.divide(amount or "0", reference.get("divisor", "0")))


async def _reference(pod: Object, container: Object, source: Object, facts: PodFacts, fetch: Fetch) -> str | None:
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"], facts)
    if "resourceFieldRef" in source:
        return resource(pod, container, source["resourceFieldRef"], facts)
    for kind, key in (("configmaps", "configMapKeyRef"), ("secrets", "secretKeyRef")):
        if key in source:
            reference = source[key]
            data = await read_source(kind, reference, fetch)
            if reference["key"] in data:
                return data[reference["key"]].decode()
            if reference.get("optional"):
                return None
            raise ConfigError(f'{kind.removesuffix("s")} "{reference["name"]}" has no key "{reference["key"]}"')
    raise ConfigError(f"unsupported valueFrom {sorted(source)}")
