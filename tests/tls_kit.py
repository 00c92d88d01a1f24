"""Certificates for tests of TLS, and gates that serve it."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import httpx

from e2e.cluster import pki
from rlfleet.api.naming import gate_server_name, sender_server_name
from rlfleet.tls import AUTHORITY, CERTIFICATE, KEY, ClientTLS
from tests.gate import kit

NAMESPACE = "team-a"


class Folder:
    """What a mounted Secret looks like: tls.crt, tls.key, ca.crt; of an authority of its own until told otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir(parents=True)
        self._made = 0

    def authority(self) -> pki.Authority:
        """A new one."""
        self._made += 1
        return pki.Authority(self.path.parent / f"{self.path.name}-authority-{self._made}")

    def fill(self, authority: pki.Authority, *, namespace: str = NAMESPACE, host: str = "127.0.0.1") -> None:
        """Replace the files: a certificate for the gates and senders of ``namespace``, and for ``host``."""
        names = tuple(dict.fromkeys((gate_server_name(namespace), sender_server_name(namespace), host, "127.0.0.1")))
        pair = authority.issue("leaf", "rlfleet", addresses=names)
        for source, name in ((pair.certificate, CERTIFICATE), (pair.key, KEY), (authority.certificate, AUTHORITY)):
            self.put(name, source.read_bytes())

    def put(self, name: str, data: bytes) -> None:
        """Replace one file at once, as a mounted Secret is."""
        new = self.path / f".{name}"
        new.write_bytes(data)
        shutil.move(new, self.path / name)

    @property
    def authorities(self) -> ClientTLS:
        """A client's view of ca.crt."""
        return ClientTLS(self.path / AUTHORITY)


class SecureGate(kit.Gate):
    """The gate's process, serving TLS out of ``folder``."""

    def __init__(self, directory: Path, engine_url: str, host: str, folder: Folder) -> None:
        super().__init__(directory, engine_url, host, RLFLEET_TLS_DIR=str(folder.path))
        self.http.close()
        self.url = f"https://{host}:9440"
        context = ssl.create_default_context(cafile=folder.path / AUTHORITY)
        self.http = httpx.Client(base_url=self.url, timeout=40, verify=context)
