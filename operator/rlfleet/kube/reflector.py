"""A view of one resource in all namespaces or in some: list, watch, and the difference after every new list.

Invariants:
- an object that vanished while the watch was broken is reported as a deletion by the next list;
- the view never goes back: an older version of an object does not replace a newer one, nor revive a deleted one;
- what this process itself writes is put into the view at once (``observe``), and its own deletions are named until
  the view shows them (``stale_keys``), so nobody decides on a view that is behind its own writes.

Callbacks get the object's key and its labels before and after, never a reason to trust the event: readers look at
the view.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from .client import KubeClient, Obj
from .errors import ApiError, Gone
from .resources import Resource

log = logging.getLogger(__name__)

#: (namespace, name)
Key = tuple[str, str]


#: Objects that are gone and still remembered.
DEPARTED = 256


@dataclass(frozen=True, slots=True)
class Change:
    """Something about ``key`` changed; ``labels`` and ``old_labels`` find the owners (empty: no object)."""

    key: Key
    uid: str
    labels: Mapping[str, str]
    old_labels: Mapping[str, str]


def key_of(obj: Obj) -> Key:
    """(namespace, name) of an object."""
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def version_of(obj: Obj) -> int:
    """The resourceVersion as a number: comparable within one resource since Kubernetes 1.35, and before by practice."""
    text = obj["metadata"].get("resourceVersion", "0")
    return int(text) if text.isdigit() else 0


def _remember(memory: dict[str, Obj], uid: str, obj: Obj) -> None:
    memory[uid] = obj
    while len(memory) > DEPARTED:
        del memory[next(iter(memory))]


@dataclass(slots=True)
class _Deleted:
    uid: str
    at: float


class Reflector:
    """Keeps a view of ``resource`` in ``namespaces`` (none named: all) that match ``label_selector``.

    ``run()`` until cancelled; ``wait_synced()`` returns after the first list of each namespace.
    ``relist_seconds`` lists again in good health too (with jitter), in case an event was lost without a trace.
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        *,
        namespaces: Iterable[str] = (),
        label_selector: str = "",
        on_change: Callable[[Change], None] = lambda change: None,
        inactivity_timeout: float = 70.0,
        relist_seconds: float = 600.0,
        list_timeout: float = 30.0,
        index_labels: Iterable[str] = (),
        on_reset: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._client = client
        self.resource = resource
        #: What is listed and watched by itself; None stands for all namespaces.
        self._scopes: tuple[str | None, ...] = tuple(dict.fromkeys(namespaces)) or (None,)
        self._selector = label_selector
        self._on_change = on_change
        self._inactivity = inactivity_timeout
        self._relist = relist_seconds
        self._list_timeout = list_timeout
        self._on_reset = on_reset
        self._objects: dict[Key, Obj] = {}
        self._departed: dict[str, Obj] = {}
        self._before: dict[str, Obj] = {}
        self._by_uid: dict[str, Key] = {}
        self._by_label: dict[str, dict[str, set[Key]]] = {label: {} for label in index_labels}
        self._deleted: dict[Key, _Deleted] = {}
        self._listed: set[str | None] = set()
        self._synced = asyncio.Event()

    # ------------------------------------------------------------------------------------------ reading

    @property
    def missing(self) -> str:
        """Which namespaces have not been listed yet; empty: the view is complete."""
        return ", ".join(s or "all namespaces" for s in self._scopes if s not in self._listed)

    def covers(self, namespace: str) -> bool:
        """Whether objects of ``namespace`` have been listed: one that may not be read holds up no other."""
        return namespace in self._listed or None in self._listed

    async def wait_synced(self) -> None:
        """Wait for the first list."""
        await self._synced.wait()

    def get(self, namespace: str, name: str) -> Obj | None:
        """The object as last seen. Shared: do not change it."""
        return self._objects.get((namespace, name))

    def by_uid(self, uid: str) -> Obj | None:
        """The object with this UID, if it is in the view."""
        key = self._by_uid.get(uid)
        return self._objects.get(key) if key else None

    def last_of(self, uid: str) -> Obj | None:
        """One of the ``DEPARTED`` objects that went last, as it was seen before it went; None: nothing is known."""
        return self._departed.get(uid)

    def before_deletion(self, uid: str) -> Obj | None:
        """The object as it was seen last before its deletion was asked for; None: not asked for, or not known.

        Of the ``DEPARTED`` objects whose deletion was asked for last. What had ended by then was not ended by that.
        """
        return self._before.get(uid)

    def by_label(self, label: str, value: str, *, namespace: str | None = None) -> list[Obj]:
        """Objects whose indexed ``label`` has ``value``, in order of their names."""
        keys = self._by_label[label].get(value, ())
        return [self._objects[k] for k in sorted(keys) if namespace is None or k[0] == namespace]

    def select(self, namespace: str, match_labels: Mapping[str, str]) -> list[Obj]:
        """Objects of ``namespace`` that carry all of ``match_labels`` (none: nothing, never everything)."""
        if not match_labels:
            return []
        for label, value in match_labels.items():
            if label in self._by_label:
                candidates: Iterable[Obj] = self.by_label(label, value, namespace=namespace)
                break
        else:
            candidates = (self._objects[k] for k in sorted(self._objects) if k[0] == namespace)
        wanted = match_labels.items()
        return [o for o in candidates if wanted <= (o["metadata"].get("labels") or {}).items()]

    def at_address(self, namespace: str, *ips: str) -> list[Obj]:
        """Objects of ``namespace`` whose status.podIP is one of ``ips``; one walk over all objects."""
        wanted = {ip for ip in ips if ip}
        if not wanted:
            return []
        keys = [
            k for k, o in self._objects.items() if k[0] == namespace and (o.get("status") or {}).get("podIP") in wanted
        ]
        return [self._objects[k] for k in sorted(keys)]

    def __len__(self) -> int:
        return len(self._objects)

    # ------------------------------------------------------------------------------------------ own writes

    def note_delete(self, namespace: str, name: str, uid: str) -> None:
        """Remember that this process deleted the object with ``uid``."""
        self._deleted[namespace, name] = _Deleted(uid, asyncio.get_running_loop().time())
        self._settle((namespace, name))

    def stale_keys(self, namespace: str, prefix: str = "", *, older_than: float = 0.0) -> list[Key]:
        """Names with ``prefix`` that this process deleted ``older_than`` seconds ago and the view still shows alive."""
        now = asyncio.get_running_loop().time()
        return [
            k
            for k, d in self._deleted.items()
            if k[0] == namespace and k[1].startswith(prefix) and now - d.at >= older_than
        ]

    def observe(self, obj: Obj) -> None:
        """Put into the view what the apiserver answered to a write or a live read."""
        self._put(obj)

    def observe_absent(self, namespace: str, name: str) -> None:
        """A live read answered that no such object exists."""
        self._remove((namespace, name))

    def _settle(self, key: Key) -> None:
        entry = self._deleted.get(key)
        if entry is None:
            return
        obj = self._objects.get(key)
        if obj is None or obj["metadata"].get("uid") != entry.uid or obj["metadata"].get("deletionTimestamp"):
            del self._deleted[key]

    # ------------------------------------------------------------------------------------------ following

    async def run(self) -> None:
        """Follow the resource until cancelled; errors are logged and retried with growing pauses."""
        async with asyncio.TaskGroup() as group:
            for scope in self._scopes:
                group.create_task(self._run(scope))

    async def _run(self, scope: str | None) -> None:
        pause = 0.5
        while True:
            try:
                version = await self._list(scope)
                pause = 0.5
                await self._follow(scope, version)
            except Gone as e:
                self._on_reset("Gone")
                log.info("view of %s: version too old, listing again: %s", self.resource.plural, e)
                continue
            except ApiError as e:
                self._on_reset(type(e).__name__)
                log.warning("view of %s: %s; again in %.1f s", self.resource.plural, e, pause)
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, 30.0)

    async def _list(self, scope: str | None) -> str:
        result = await self._client.list(
            self.resource, scope, label_selector=self._selector, timeout=self._list_timeout
        )
        found = {key_of(o) for o in result.items}
        listed = int(result.resource_version)
        for obj in result.items:
            self._put(obj)
        for key in [k for k in self._objects if k not in found and scope in (None, k[0])]:
            # Written here after the list was taken: the watch will tell.
            if version_of(self._objects[key]) <= listed:
                self._remove(key)
        self._listed.add(scope)
        if len(self._listed) == len(self._scopes):
            self._synced.set()
        return result.resource_version

    async def _follow(self, scope: str | None, version: str) -> None:
        """Watch, reconnecting from the last version, until a new list is due or the version is too old."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._relist * random.uniform(0.9, 1.1)
        failures = 0
        while (left := until - loop.time()) > 0:
            try:
                stream = self._client.watch(
                    self.resource,
                    scope,
                    resource_version=version,
                    label_selector=self._selector,
                    server_timeout=min(300.0, left + 1),
                    inactivity_timeout=self._inactivity,
                )
                async with aclosing(stream):
                    async for event in stream:
                        failures = 0
                        version = event.object["metadata"]["resourceVersion"]
                        if event.type == "DELETED":
                            self._remove(key_of(event.object), event.object["metadata"].get("uid", ""))
                        elif event.type != "BOOKMARK":
                            self._put(event.object)
                        if loop.time() >= until:
                            break
            except Gone:
                raise
            except ApiError as e:
                failures += 1
                self._on_reset(type(e).__name__)
                if failures > 3:
                    raise
                log.info("watch of %s: %s; reconnecting", self.resource.plural, e)
                await asyncio.sleep(0.2 * failures)

    def _put(self, obj: Obj) -> None:
        key = key_of(obj)
        old = self._objects.get(key)
        if old is not None and version_of(obj) <= version_of(old):
            return
        obj["metadata"].pop("managedFields", None)  # half of an object's size, and nobody reads it
        if old is not None:
            self._unindex(key, old)
        self._objects[key] = obj
        uid = obj["metadata"].get("uid", "")
        if old is not None and old["metadata"].get("uid") == uid:
            self._note_deletion(uid, old, obj)
        self._by_uid[uid] = key
        labels = obj["metadata"].get("labels") or {}
        for label, values in self._by_label.items():
            if label in labels:
                values.setdefault(labels[label], set()).add(key)
        self._settle(key)
        old_labels = (old["metadata"].get("labels") or {}) if old is not None else {}
        self._on_change(Change(key, uid, labels, old_labels))

    def _note_deletion(self, uid: str, old: Obj, new: Obj) -> None:
        if "deletionTimestamp" in new["metadata"] and "deletionTimestamp" not in old["metadata"]:
            _remember(self._before, uid, old)

    def _remove(self, key: Key, uid: str = "") -> None:
        old = self._objects.get(key)
        if old is None or (uid and old["metadata"].get("uid") != uid):
            return
        del self._objects[key]
        self._unindex(key, old)
        self._settle(key)
        _remember(self._departed, old["metadata"].get("uid", ""), old)
        self._on_change(Change(key, old["metadata"].get("uid", ""), {}, old["metadata"].get("labels") or {}))

    def _unindex(self, key: Key, old: dict[str, Any]) -> None:
        uid = old["metadata"].get("uid", "")
        if self._by_uid.get(uid) == key:
            del self._by_uid[uid]
        labels = old["metadata"].get("labels") or {}
        for label, values in self._by_label.items():
            if label in labels and labels[label] in values:
                values[labels[label]].discard(key)
                if not values[labels[label]]:
                    del values[labels[label]]
