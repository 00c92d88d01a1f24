"""Builds the Kubernetes programs that the local cluster runs, once per machine.

The versions are pinned by Go modules beside this file (``programs/`` for Kubernetes and etcd, ``helm/`` for the chart
renderer, ``coredns/`` for the DNS server of a real node, ``lws/`` for the controller of LeaderWorkerSets). The cache
folder's name carries a hash of the first two modules' ``go.mod`` and ``go.sum``, other programs' own names one of their
module, so a changed pin never meets an old program. Invariant: a program under its final name is complete. Each one is
built under a temporary name and renamed, under a lock that a second process waits for, so an interrupted build leaves
nothing half done and does not lose the programs that were finished before it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KUBERNETES_VERSION = "1.34.4"

_HERE = Path(__file__).resolve().parent
_STAMP = "k8s.io/component-base/version"
# Without the stamp a server reports v0.0.0, and clients compare versions.
_KUBERNETES_LDFLAGS = " ".join(
    [
        "-s -w",
        f"-X {_STAMP}.gitVersion=v{KUBERNETES_VERSION}",
        f"-X {_STAMP}.gitMajor={KUBERNETES_VERSION.split('.', maxsplit=1)[0]}",
        f"-X {_STAMP}.gitMinor={KUBERNETES_VERSION.split('.')[1]}",
    ]
)
_PROGRESS_SECONDS = 15.0

Say = Callable[[str], None]


class BuildError(Exception):
    """A program could not be built; the message ends with the compiler's last lines."""


@dataclass(frozen=True)
class Program:
    """One program to build: which module pins it, and which package it is."""

    name: str
    module: str
    package: str
    ldflags: str = "-s -w"


PROGRAMS: tuple[Program, ...] = (
    Program("etcd", "programs", "go.etcd.io/etcd/server/v3"),
    Program("kube-apiserver", "programs", "k8s.io/kubernetes/cmd/kube-apiserver", _KUBERNETES_LDFLAGS),
    Program(
        "kube-controller-manager", "programs", "k8s.io/kubernetes/cmd/kube-controller-manager", _KUBERNETES_LDFLAGS
    ),
    Program("kube-scheduler", "programs", "k8s.io/kubernetes/cmd/kube-scheduler", _KUBERNETES_LDFLAGS),
    Program("kubectl", "programs", "k8s.io/kubernetes/cmd/kubectl", _KUBERNETES_LDFLAGS),
    Program("helm", "helm", "helm.sh/helm/v3/cmd/helm"),
)


#: What only a real node (e2e.node) runs beside the others.
NODE_PROGRAMS: tuple[Program, ...] = (
    Program("kubelet", "programs", "k8s.io/kubernetes/cmd/kubelet", _KUBERNETES_LDFLAGS),
    Program("kube-proxy", "programs", "k8s.io/kubernetes/cmd/kube-proxy", _KUBERNETES_LDFLAGS),
    Program("coredns", "coredns", "."),
)

#: Controllers of others whose pods are adopted in scenarios.
CONTROLLERS: tuple[Program, ...] = (Program("lws-manager", "lws", "sigs.k8s.io/lws/cmd"),)


def cache_root() -> Path:
    """The folder below which everything lies that is built once per machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlfleet"


def cache_folder() -> Path:
    """The folder of this pin's programs (it may not exist yet)."""
    return cache_root() / f"k8s-{KUBERNETES_VERSION}-{_pins('programs', 'helm')}"


def _pins(*modules: str) -> str:
    digest = hashlib.sha256()
    for module in modules:
        for name in ("go.mod", "go.sum"):
            digest.update((_HERE / module / name).read_bytes())
    return digest.hexdigest()[:12]


def _file(program: Program) -> str:
    return program.name if program.module in ("programs", "helm") else f"{program.name}-{_pins(program.module)}"


def ensure_programs(
    names: Sequence[str] | None = None, say: Say = print, *, catalog: Sequence[Program] = PROGRAMS
) -> dict[str, Path]:
    """Returns the path of each named program of ``catalog`` (default: all), building those that are missing.

    ``say`` receives one progress line at a time. Raises BuildError when Go is absent or a build fails.
    """
    wanted = [p for p in catalog if names is None or p.name in names]
    if names is not None and len(wanted) != len(set(names)):
        raise ValueError(f"unknown program in {list(names)}")
    folder = cache_folder()
    paths = {p.name: folder / _file(p) for p in wanted}
    if all(path.exists() for path in paths.values()):
        return paths
    if shutil.which("go") is None:
        raise BuildError("Go is needed to build Kubernetes (https://go.dev/dl): no 'go' in PATH")
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / ".lock", say):
        missing = [p for p in wanted if not paths[p.name].exists()]
        if missing:
            say(f"building {len(missing)} programs once into {folder} (about 6 minutes on 2 cores)")
        for number, program in enumerate(missing, 1):
            _build(program, paths[program.name], f"[{number}/{len(missing)}] {program.name}", say)
    return paths


def module_folder(module: str, path: str) -> Path:
    """Where Go keeps the source of ``path``, a module that ``module`` requires; BuildError when it can not be had."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", path],
        cwd=_HERE / module, env=_go_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise BuildError(f"{path}: go mod download ended with {done.returncode}:\n{done.stderr}{done.stdout}")
    return Path(json.loads(done.stdout)["Dir"])


def _go_environment() -> dict[str, str]:
    # Pure Go: no C compiler needed, and no dependence on the builder's libc. GOFLAGS of the user could change the pins.
    return {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}


def _build(program: Program, target: Path, label: str, say: Say) -> None:
    # The lock is ours, so whatever lies under the temporary name is the rest of an interrupted build.
    temporary = target.with_name(f".{program.name}.building")
    temporary.unlink(missing_ok=True)
    log = target.with_name(f"{program.name}.build.log")
    command = ["go", "build", "-trimpath", "-ldflags", program.ldflags, "-o", str(temporary), program.package]
    started = time.monotonic()
    say(f"{label}: building")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=_HERE / program.module,
            env=_go_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            while True:
                try:
                    process.wait(_PROGRESS_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    say(f"{label}: {time.monotonic() - started:.0f} s")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        temporary.unlink(missing_ok=True)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise BuildError(f"{program.name}: go build ended with {process.returncode}:\n{tail}")
    os.replace(temporary, target)
    log.unlink()
    say(f"{label}: done in {time.monotonic() - started:.0f} s")


@contextmanager
def _lock(path: Path, say: Say) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the programs: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main() -> int:
    """``python -m e2e.cluster.programs``: builds what is missing and prints the folder."""
    try:
        ensure_programs(say=lambda line: print(line, flush=True))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(cache_folder())
    return 0


if __name__ == "__main__":
    sys.exit(main())
