"""What a real node takes of a machine (e2e.node.host), as far as it is seen without root: files of control groups."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from e2e.node import host

NAME = "rlfleet-test"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where control groups would be mounted."""
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    return tmp_path


def test_a_new_group_of_the_first_version_gets_processors_and_memory_of_the_one_above(groups: Path) -> None:
    (groups / "cpuset" / NAME).mkdir(parents=True)
    for knob, value in (("cpuset.cpus", "0-7\n"), ("cpuset.mems", "0\n")):
        (groups / "cpuset" / knob).write_text(value)
        (groups / "cpuset" / NAME / knob).write_text("\n")  # the kernel makes it with the folder
    host.make_cgroup(NAME)
    assert (groups / "cpuset" / NAME / "cpuset.cpus").read_text() == "0-7\n"
    assert (groups / "cpuset" / NAME / "cpuset.mems").read_text() == "0\n"


def test_a_new_group_of_the_second_version_has_what_the_one_above_has(groups: Path) -> None:
    # With the controller turned on, as systemd does it. The group at the top has no cpuset.cpus to copy.
    (groups / "cgroup.controllers").write_text("cpuset cpu memory\n")
    (groups / NAME).mkdir()
    (groups / NAME / "cpuset.cpus").write_text("\n")
    host.make_cgroup(NAME)
    assert (groups / NAME / "cpuset.cpus").read_text() == "\n"


def test_the_guide_names_every_package_that_may_be_missing() -> None:
    page = (Path(host.__file__).parents[2] / "docs/guides/real-node.md").read_text().replace("```", "")
    named = {word for quoted in re.findall(r"`([^`]+)`", page, re.DOTALL) for word in quoted.split()}
    for packages in (host.NODE_PACKAGES, host.IMAGE_PACKAGES, host.COMPILER):
        # nsenter belongs to every Debian.
        assert set(packages.values()) - {"util-linux"} <= named


def test_a_process_that_is_gone_has_no_name() -> None:
    assert host.comm(str(os.getpid())) != ""
    assert host.comm("0") == ""  # no process has this pid


def test_a_socket_is_somebodys_while_somebody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed kubelet left behind goes, also while another kubelet runs elsewhere on the machine."""
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    path = Path("kubelet.sock")
    assert not host.listens(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        assert host.listens(path)
    assert path.exists()
    assert not host.listens(path)
