"""Which process listens where the engine answers, told by the kernel of the gate's own network namespace.

An engine's container that restarts keeps its pod, its address and its gate, and most engines do not say which process
of theirs answers. The kubelet tells it late: a pause in between would be recorded for the process before.

Invariant: two different answers are two different sockets, so two processes; whatever is not certain is None.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

#: State LISTEN in the kernel's tables (include/net/tcp_states.h).
_LISTEN = "0A"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def engine_listener(engine_url: str, tables: Path = Path("/proc/net")) -> Callable[[], str | None]:
    """A question for the socket that listens at ``engine_url``: its inode, with the boot of the node it counts for.

    It answers None while nobody listens, and where nothing certain can be said: the URL is not one of this network
    namespace (no loopback address), several sockets share the port, or there is no such table (not Linux, gVisor).
    The format of the tables is that of proc_pid_net(5) and of the kernel's Documentation/networking/proc_net_tcp.rst.
    """
    parts = urlsplit(engine_url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    hosts = _loopback(parts.hostname or "")

    def ask() -> str | None:
        found: dict[_Address, list[str]] = {}
        for address, inode in _listeners(tables, port) if hosts else ():
            found.setdefault(address, []).append(inode)
        exact = [inode for host in hosts for inode in found.get(host, [])]
        # A socket at the address itself takes precedence over one at all addresses.
        inodes = exact or [inode for address, at in found.items() if address.is_unspecified for inode in at]
        return f"{_boot()}:{inodes[0]}" if len(inodes) == 1 else None

    return ask


def _loopback(host: str) -> tuple[_Address, ...]:
    if host == "localhost":
        return ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ()
    return (address,) if address.is_loopback else ()


def _listeners(tables: Path, port: int) -> Iterator[tuple[_Address, str]]:
    for name in ("tcp", "tcp6"):
        try:
            with (tables / name).open() as table:
                next(table, None)
                for line in table:
                    _, local, _, state, *rest = line.split()
                    # Those that listen come first. Connections, of which an engine has thousands, are not read.
                    if state != _LISTEN:
                        break
                    address, _, number = local.partition(":")
                    if int(number, 16) == port:
                        yield _address(address), rest[5]
        except OSError:
            continue


def _address(text: str) -> _Address:
    """An address of the tables: words of four bytes, each in the order of the machine, which is little endian."""
    raw = b"".join(bytes.fromhex(word)[::-1] for word in re.findall("." * 8, text))
    address = ipaddress.ip_address(raw)
    return getattr(address, "ipv4_mapped", None) or address


@cache
def _boot() -> str:
    """Inodes of sockets are counted anew when the node boots, while the gate's record may outlive that."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
