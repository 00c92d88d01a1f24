"""TLS between operator, gates and senders: certificates in files, taken up anew when the files change.

Invariants:
- a certificate or authority that is replaced on disk counts from the next handshake on, without a restart;
- files that do not fit together (a replacement under way, a broken one) change nothing: what was good goes on;
- a listener with a certificate answers nothing in plain text, and a client checks chain and name, always.

Who somebody is is still said by tokens and pod UIDs; TLS keeps them from being read or changed on the way.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

#: Files of a folder that is a mounted Secret of type kubernetes.io/tls, as cert-manager writes it.
CERTIFICATE: Final = "tls.crt"
KEY: Final = "tls.key"
AUTHORITY: Final = "ca.crt"

_Signature = tuple[tuple[int, int, int], ...]


class TLSError(Exception):
    """The files cannot be used; the message names them."""


class _Files:
    """A context made of files, made again when one of them is another."""

    def __init__(self, files: Sequence[Path], make: Callable[[], ssl.SSLContext]) -> None:
        self._files = files
        self._make = make
        self._signature: _Signature | None = None
        try:
            self._signature = self._look()
            self._context = make()
        except (OSError, ValueError) as e:
            names = " and ".join(str(f) for f in files)
            raise TLSError(f"{names}: {e.strerror if isinstance(e, OSError) and e.strerror else e}") from e

    def _look(self) -> _Signature:
        # The inode too: the kubelet replaces the whole folder behind a link.
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in (f.stat() for f in self._files))

    def current(self) -> ssl.SSLContext:
        """The context of the files as they are now."""
        try:
            found = self._look()
            if found == self._signature:
                return self._context
            context = self._make()
        except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
            # Not remembered as seen: the next handshake looks again.
            log.warning("%s can not be used (%s); going on with what was read before", self._files[0], e)
            return self._context
        log.info("TLS files were replaced", extra={"files": [str(f) for f in self._files]})
        self._signature, self._context = found, context
        return context


class ServerTLS:
    """The certificate of a listener, from ``folder``; TLSError when it cannot be used."""

    def __init__(self, folder: Path) -> None:
        certificate, key = folder / CERTIFICATE, folder / KEY

        def make() -> ssl.SSLContext:
            context = _server()
            context.load_cert_chain(certificate, key)
            return context

        self._files = _Files((certificate, key), make)

    def context(self) -> ssl.SSLContext:
        """For the listener, once: every handshake gets the certificate that lies there at that time."""

        def hello(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._files.current()

        context = _server()
        context.sni_callback = hello
        return context


class ClientTLS:
    """The authorities that a client believes, from a PEM file; TLSError when it cannot be used."""

    def __init__(self, authorities: Path) -> None:
        def make() -> ssl.SSLContext:
            context = ssl.create_default_context(cafile=authorities)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if not context.get_ca_certs():
                raise ValueError("holds no certificate authority")
            return context

        self._files = _Files((authorities,), make)

    def context(self) -> ssl.SSLContext:
        """For one call; the same object while the file stays as it is."""
        return self._files.current()


def _server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def why(error: BaseException) -> str:
    """What a failed connection says about certificates; empty when it is about something else."""
    inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {inner.verify_message}"
    return f"no TLS: {inner.reason or inner}" if isinstance(inner, ssl.SSLError) else ""
