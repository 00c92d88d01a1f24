"""Which process listens where the engine answers, told by the kernel of the gate's own network namespace.

An engine's container that restarts keeps its pod, its address and its gate, and most engines do not say which process
of theirs answers. The kubelet tells it late: a pause in between would be recorded for the process before.

The question is sock_diag(7), for listening sockets only. ``/proc/net/tcp`` would tell the same, but to read its first
line the kernel walks through the connections of the whole node.

Invariant: two different answers are two different sockets, so two processes; whatever is not certain is None.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Numbers of linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h and net/tcp_states.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_DUMP, _NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
_TCP_LISTEN = 10
#: struct nlmsghdr; then of inet_diag_req_v2: family, protocol, extensions, states; the rest of it is zero: any socket.
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
#: struct inet_diag_msg: family, state; source port; source address; cookie, unique since the node booted.
_MESSAGE = struct.Struct("!BBxxH2x16s16x4xQ")
#: The kernel answers at once; a limit all the same, for nothing else runs in the gate meanwhile.
_SECONDS = 1.0

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def engine_listener(engine_url: str, pod_ip: str) -> Callable[[], str | None]:
    """A question for the socket that listens at ``engine_url``: its cookie, with the boot of the node it counts for.

    It answers None while nobody listens, and where nothing certain can be said: the URL is not one of this network
    namespace (neither ``pod_ip`` nor a loopback address), several sockets share the port, or the kernel does not tell
    (not Linux, gVisor).
    """
    parts = urlsplit(engine_url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    hosts = _here(parts.hostname or "", ipaddress.ip_address(pod_ip))

    def ask() -> str | None:
        try:
            found = (
                [s for family in (socket.AF_INET, socket.AF_INET6) for s in _listening(family, port)] if hosts else []
            )
        except OSError as e:
            log.debug("the kernel does not tell who listens: %s", e)
            return None
        # A socket at the address itself takes precedence over one at all addresses.
        cookies = [cookie for address, cookie in found if address in hosts]
        cookies = cookies or [cookie for address, cookie in found if address.is_unspecified]
        return f"{_boot()}:{cookies[0]:x}" if len(cookies) == 1 else None

    return ask


def _here(host: str, pod_ip: _Address) -> tuple[_Address, ...]:
    """The addresses of this network namespace, which the pod's containers share, that ``host`` means."""
    if host == "localhost":
        return ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ()
    return (address,) if address.is_loopback or address == pod_ip else ()


def _listening(family: socket.AddressFamily, port: int) -> Iterator[tuple[_Address, int]]:
    """Address and cookie of each socket that listens at ``port``. OSError: the kernel does not tell all of them."""
    size = 4 if family == socket.AF_INET else 16
    for message in _dump(_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)):
        _, state, at, source, cookie = _MESSAGE.unpack_from(message)
        if (state, at) == (_TCP_LISTEN, port):
            address = ipaddress.ip_address(source[:size])
            yield getattr(address, "ipv4_mapped", None) or address, cookie


def _dump(request: bytes) -> Iterator[bytes]:
    flags = _NLM_F_REQUEST | _NLM_F_DUMP
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_SECONDS)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, flags, 1, 0) + request)
        while True:
            answer = kernel.recv(1 << 16)
            while answer:
                length, kind, flags, _, _ = _HEADER.unpack_from(answer)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR or flags & _NLM_F_DUMP_INTR:
                    raise OSError(f"sock_diag: message {kind}, flags {flags:#x}")
                yield answer[_HEADER.size : length]
                answer = answer[(length + 3) & ~3 :]


@cache
def _boot() -> str:
    """Cookies are counted anew when the node boots, while the gate's record may outlive that."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
