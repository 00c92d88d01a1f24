"""Which socket listens where an engine answers, asked of the kernel of this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlfleet.gate.listener import engine_listener
from tests.gate.kit import address, free_port

POD_IP = "10.0.0.9"

Listen = Callable[[str, int], socket.socket]


@pytest.fixture
def listen() -> Iterator[Listen]:
    made: list[socket.socket] = []

    def start(host: str, port: int) -> socket.socket:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen()
        made.append(listener)
        return listener

    yield start
    for listener in made:
        listener.close()


def test_another_socket_at_the_same_address_is_another_answer(listen: Listen) -> None:
    host = address()
    port = free_port(host)
    ask = engine_listener(f"http://{host}:{port}", POD_IP)
    assert ask() is None
    first = listen(host, port)
    before = ask()
    assert before is not None
    assert ask() == before
    with socket.create_connection((host, port)):
        assert ask() == before, "connections are not listeners"
    first.close()
    assert ask() is None
    listen(host, port)
    assert ask() not in (None, before)


def test_the_answer_names_the_boot_that_it_counts_for(listen: Listen) -> None:
    host = address()
    port = free_port(host)
    listen(host, port)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert str(engine_listener(f"http://{host}:{port}", POD_IP)()).startswith(f"{boot}:")


def test_one_at_all_addresses_counts_unless_one_is_at_the_address_itself(listen: Listen) -> None:
    host = address()
    port = free_port("0.0.0.0")
    ask = engine_listener(f"http://{host}:{port}", POD_IP)
    listen("::", port)  # takes IPv4 too
    everywhere = ask()
    assert everywhere is not None
    listen(host, port)
    assert ask() not in (None, everywhere)


def test_of_several_none_is_certain(listen: Listen) -> None:
    host = address()
    port = free_port(host)
    listen(host, port)
    listen(host, port)
    assert engine_listener(f"http://{host}:{port}", POD_IP)() is None


def test_other_ports_and_addresses_do_not_count(listen: Listen) -> None:
    host, other = address(), address()
    port = free_port(host)
    listen(other, port)
    listen(host, free_port(host))
    assert engine_listener(f"http://{host}:{port}", POD_IP)() is None


@pytest.mark.parametrize("url", ["http://10.0.0.7:{}", "http://engine.example:{}", "http://[2001:db8::1]:{}"])
def test_nothing_is_certain_of_another_network_namespace(url: str, listen: Listen) -> None:
    port = free_port("127.0.0.1")
    listen("::", port)
    assert engine_listener(url.format(port), POD_IP)() is None


@pytest.mark.parametrize(
    ("pod_ip", "url"),
    [("10.0.0.7", "http://10.0.0.7:{}"), ("2001:db8::1", "http://[2001:db8:0::1]:{}"), ("::1", "http://[::1]:{}")],
)
def test_the_address_of_the_pod_is_of_this_network_namespace(pod_ip: str, url: str, listen: Listen) -> None:
    """Gates are told to find their engines there, by the operator and by docs/examples/adopt.yaml."""
    port = free_port("127.0.0.1")
    ask = engine_listener(url.format(port), pod_ip)
    assert ask() is None
    listen("::", port)
    assert ask() is not None


def test_localhost_is_either_loopback_address(listen: Listen) -> None:
    port = free_port("127.0.0.1")
    listen("::1", port)
    assert engine_listener(f"http://localhost:{port}", POD_IP)() is not None


def test_where_the_kernel_does_not_tell_there_is_no_answer(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as gVisor's, which knows no such family of sockets."""
    host = address()
    port = free_port(host)
    listen(host, port)
    assert engine_listener(f"http://{host}:{port}", POD_IP)() is not None
    monkeypatch.setattr("rlfleet.gate.listener._NETLINK_SOCK_DIAG", 31)
    assert engine_listener(f"http://{host}:{port}", POD_IP)() is None
