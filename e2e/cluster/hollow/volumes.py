"""A pod's volumes as host directories.

emptyDir (memory-backed ones lie on a tmpfs), configMap, secret, downwardAPI, projected (service account tokens come
from a real TokenRequest bound to the pod) and hostPath. A changed Secret reaches a running pod, file by file (a kubelet
changes all files at once, so whoever copes with this copes with that); a changed ConfigMap does not. Limits and
read-only mounts are not enforced: nothing here depends on either.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from e2e.cluster.hollow.environment import ConfigError, Fetch, PodFacts, field, read_source, resource

Object = dict[str, Any]
# (audience or "", seconds) -> a token of the pod's service account, bound to the pod.
Token = Callable[[str, int], Awaitable[str]]

SERVICE_ACCOUNT_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class Volumes:
    """The host directories of one pod, and the way from a mount path to them."""

    def __init__(self, pod: Object, folder: Path, memory_folder: Path, facts: PodFacts) -> None:
        self._pod = pod
        self._folder = folder
        self._memory = memory_folder
        self._facts = facts
        self._hosts: dict[str, Path] = {}

    async def prepare(self, fetch: Fetch, token: Token) -> None:
        """Creates and fills the directories; can be repeated after a ConfigError."""
        for volume in self._pod["spec"].get("volumes", []):
            name = volume["name"]
            if name in self._hosts:
                continue
            if "hostPath" in volume:
                self._hosts[name] = Path(volume["hostPath"]["path"])
                continue
            in_memory = volume.get("emptyDir", {}).get("medium") == "Memory"
            host = (self._memory if in_memory else self._folder) / name
            host.mkdir(parents=True, exist_ok=True, mode=0o700)
            if "projected" in volume:
                for source in volume["projected"].get("sources", []):
                    await self._fill(host, source, fetch, token)
            elif "emptyDir" not in volume:
                kind = next((k for k in ("configMap", "secret", "downwardAPI") if k in volume), None)
                if kind is None:
                    raise ConfigError(f'volume "{name}": unsupported type {sorted(set(volume) - {"name"})}')
                source = dict(volume[kind])
                source.setdefault("name", source.get("secretName", ""))
                await self._fill(host, {kind: source}, fetch, token)
            self._hosts[name] = host

    @property
    def secrets(self) -> list[Object]:
        """The volumes that are Secrets."""
        return [volume for volume in self._pod["spec"].get("volumes", []) if "secret" in volume]

    async def refresh(self, fetch: Fetch) -> None:
        """Write again what has changed in Secrets; one that is gone stays as it was."""
        for volume in self.secrets:
            if host := self._hosts.get(volume["name"]):
                source = {**volume["secret"], "name": volume["secret"]["secretName"], "optional": True}
                await self._fill(host, {"secret": source}, fetch, _no_token)

    def mounts(self, container: Object) -> dict[str, str]:
        """Mount path -> host directory of a container."""
        result = {}
        for mount in container.get("volumeMounts", []):
            host = self._hosts[mount["name"]]
            inner = mount.get("subPath", "")
            if inner:
                host = host / inner
                if not host.exists():
                    host.mkdir(parents=True)
            result[mount["mountPath"]] = str(host)
        return result

    def remove(self) -> None:
        """Deletes the directories (never a hostPath)."""
        for folder in (self._folder, self._memory):
            shutil.rmtree(folder, ignore_errors=True)

    async def _fill(self, host: Path, source: Object, fetch: Fetch, token: Token) -> None:
        if "serviceAccountToken" in source:
            wanted = source["serviceAccountToken"]
            text = await token(wanted.get("audience", ""), int(wanted.get("expirationSeconds", 3600)))
            _write(host, wanted["path"], text.encode())
        elif "downwardAPI" in source:
            for item in source["downwardAPI"].get("items", []):
                if "fieldRef" in item:
                    text = field(self._pod, item["fieldRef"]["fieldPath"], self._facts)
                else:
                    text = resource(self._pod, {}, item["resourceFieldRef"], self._facts)
                _write(host, item["path"], text.encode())
        elif "configMap" in source or "secret" in source:
            kind, reference = (
                ("configmaps", source["configMap"]) if "configMap" in source else ("secrets", source["secret"])
            )
            data = await read_source(kind, reference, fetch)
            items = reference.get("items") or [{"key": key, "path": key} for key in data]
            for item in items:
                if item["key"] in data:
                    _write(host, item["path"], data[item["key"]])
                elif not reference.get("optional"):
                    raise ConfigError(f'{kind.removesuffix("s")} "{reference["name"]}" has no key "{item["key"]}"')
        else:
            raise ConfigError(f"unsupported projected source {sorted(source)}")


def _write(host: Path, path: str, data: bytes) -> None:
    target = host / path
    if target.exists() and target.read_bytes() == data:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f"..{target.name}")
    new.write_bytes(data)
    new.chmod(0o600)
    new.replace(target)


async def _no_token(audience: str, seconds: int) -> str:
    raise ConfigError("a Secret has no tokens")
