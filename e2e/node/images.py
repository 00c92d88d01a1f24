"""The images: built from the Dockerfile with buildah (or docker), and brought into a node without a registry.

Everything built is kept in the cache folder, in a store of its own, so a second build of unchanged sources takes
seconds. Where no base image can be pulled, one is made of Debian's packages with debootstrap, once.

Invariant: that store holds the images and the steps that led to them, which the next build starts from, and nothing of
builds before or of builds that were killed. One process at a time works in it. What docker builds is docker's, and
nothing of its store is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.cluster.controlplane import ClusterError
from e2e.cluster.local import ROOT
from e2e.cluster.programs import cache_root
from e2e.node import host
from e2e.node.bringing import Built, bring, copy
from e2e.node.settings import PAUSE_IMAGE

if TYPE_CHECKING:
    from e2e.node.cluster import RealNode

Say = Callable[[str], None]

TARGETS = ("operator", "engine", "trainer")
TAG = "dev"
#: Made here of Debian's packages; any other base with Python 3.11 to 3.13 is used when BASE names it.
LOCAL_BASE = "localhost/rlfleet-base:bookworm"
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
_BUILD_SECONDS = 3600.0
#: All that the Dockerfile copies: an image is built anew when something of this, or its base, has changed.
SOURCES = (
    "Dockerfile", "images", "requirements.lock", "pyproject.toml", "README.md", "LICENSE", "operator",
    "e2e/__init__.py", "e2e/sim", "e2e/scenarios/__init__.py", "e2e/scenarios/ports.py",
    "e2e/scenarios/publisher.py",
)  # fmt: skip
_SOURCES_LABEL = "dev.rlfleet.sources"
#: Names for the last step of each stage of a build: what has a name is not removed with what no build needs any more.
_STAGES = "localhost/rlfleet/stage"
#: A machine whose package index has an authority of its own: the build trusts whom the machine trusts.
_TRUST = ("/etc/ssl/certs", "/usr/local/share/ca-certificates", "/usr/share/ca-certificates")

_PAUSE_SOURCE = """
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static void leave(int number) { (void)number; _exit(0); }
static void collect(int number) { (void)number; while (waitpid(-1, NULL, WNOHANG) > 0) {} }
int main(void) {
  signal(SIGTERM, leave);
  signal(SIGINT, leave);
  signal(SIGCHLD, collect);
  for (;;) pause();
}
"""


def name_of(target: str, tag: str = TAG) -> str:
    """The full name of an image of ours."""
    return f"localhost/rlfleet/{target}:{tag}"


class Builder:
    """Builds images. ``base``: the base image; empty: the one that is made here. ``install``: apt-get what lacks."""

    def __init__(self, say: Say, *, base: str = "", install: bool = False) -> None:
        self._say = say
        self._folder = cache_root() / "images"
        self._docker = shutil.which("buildah") is None and shutil.which("docker") is not None
        self._base = base
        if not self._docker:
            packages = dict(host.IMAGE_PACKAGES)
            if base:
                del packages["debootstrap"]
            host.require(packages, say, install=install)

    def build(self, targets: Sequence[str] = TARGETS, *, context: Path = ROOT, tag: str = TAG) -> dict[str, str]:
        """Builds the targets from the Dockerfile in ``context``; returns the identity of each image."""
        with self._alone():
            return self._build(targets, context, tag)

    def _build(self, targets: Sequence[str], context: Path, tag: str) -> dict[str, str]:
        base = self._base or ("" if self._docker else self._local_base())
        sources = digest_of(context, base, "" if self._docker or self._base else self.identity(base))
        found, built = {}, 0
        for target in targets:
            name, began = name_of(target, tag), time.monotonic()
            if self._label(name) == sources:
                found[target] = self.identity(name)
                self._say(f"{name}: built from these very sources, {self.size(name) / 1e6:.0f} MB")
                continue
            self._say(f"{name}: building")
            arguments = [f"--target={target}", f"--tag={name}", f"--label={_SOURCES_LABEL}={sources}"]
            if base:
                arguments.append(f"--build-arg=BASE={base}")
            for setting in ("PIP_INDEX_URL", "PIP_CERT"):
                if value := os.environ.get(setting):
                    arguments.append(f"--build-arg={setting}={value}")
            if self._docker:
                self._run("docker", "build", *arguments, str(context))
            else:
                trust = [f"--volume={path}:{path}:ro" for path in _TRUST if Path(path).is_dir()]
                said = self._buildah("bud", "--layers", "--isolation=chroot", *trust, *arguments, str(context))
                self._keep(f"{_STAGES}:{target}-{tag}-", stage_ends(said))
                built += 1
            found[target] = self.identity(name)
            self._say(f"{name}: {self.size(name) / 1e6:.0f} MB, {time.monotonic() - began:.0f} s")
        if built:
            self._prune()
        return found

    def _keep(self, beginning: str, ends: Mapping[str, str]) -> None:
        """Names the last step of each stage (number -> image), instead of those of the build before."""
        for stage, image in ends.items():
            self._buildah("tag", image, f"{beginning}{stage}")
        wanted = {f"{beginning}{stage}" for stage in ends}
        if stale := [n for n in self._names() if n.startswith(beginning) and n not in wanted]:
            self._buildah("rmi", *stale)

    def _prune(self) -> None:
        """Removes what neither an image nor its next build needs, and says what that came to."""
        before = self._disk()
        self._buildah("rmi", "--prune")
        after = self._disk()
        freed = f"; {(before - after) / 1e6:.0f} MB of earlier builds removed" if before > after else ""
        self._say(f"images and their build cache: {after / 1e9:.1f} GB{freed}")

    def _disk(self) -> int:
        return int(self._run("du", "--summarize", "--block-size=1", str(self._folder / "storage")).split()[0])

    def _names(self) -> list[str]:
        return [n for entry in json.loads(self._buildah("images", "--json")) for n in entry.get("names") or []]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else works in the store; what killed processes left there is gone."""
        if self._docker:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say("another process works with the images: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(self._folder / "scratch", ignore_errors=True)
            self._buildah("rm", "--all")
            yield

    def identity(self, name: str) -> str:
        """The image's own identity: another one after any change."""
        if self._docker:
            return self._run("docker", "image", "inspect", "--format={{.Id}}", name).strip()
        return self._buildah("inspect", "--type=image", "--format={{.FromImageID}}", name).strip()

    def _label(self, name: str) -> str:
        """The digest of the sources that an image was built from; empty: there is none, or it was built otherwise."""
        try:
            if self._docker:
                form = f'{{{{index .Config.Labels "{_SOURCES_LABEL}"}}}}'
                return self._run("docker", "image", "inspect", f"--format={form}", name).strip()
            form = f'{{{{index .OCIv1.Config.Labels "{_SOURCES_LABEL}"}}}}'
            return self._buildah("inspect", "--type=image", f"--format={form}", name).strip()
        except ClusterError:
            return ""

    def size(self, name: str) -> int:
        """Bytes of the unpacked image."""
        if self._docker:
            return int(self._run("docker", "image", "inspect", "--format={{.Size}}", name))
        listed = json.loads(self._buildah("images", "--json"))
        for entry in listed:
            if name in (entry.get("names") or []):
                return _bytes(entry["size"])
        raise ClusterError(f"no image {name}: build it with 'make image'")

    def built(self) -> list[str]:
        """Targets of which an image is there."""
        found = []
        for target in TARGETS:
            try:
                self.identity(name_of(target))
            except ClusterError:
                continue
            found.append(target)
        return found

    def load(self, node: RealNode, name: str) -> None:
        """Brings a built image into the node's store, unless it is there."""
        identity = self.identity(name)
        if node.holds_image(name, identity):
            return
        began = time.monotonic()
        with self._alone(), tempfile.TemporaryDirectory(dir=self._scratch()) as folder:
            if self._docker:
                archive = Path(folder) / "image.tar"
                self._run("docker", "save", f"--output={archive}", name)
                travelled = archive.stat().st_size
                node.import_image(lambda stream: copy(archive, stream), name, identity)
            else:
                form = "{{range .OCIv1.RootFS.DiffIDs}}{{.}} {{end}}"
                layers = self._buildah("inspect", "--type=image", f"--format={form}", name).split()
                image = Built(name, identity, self.size(name), tuple(x.removeprefix("sha256:") for x in layers))
                travelled = bring(node, image, Path(folder), lambda to: self._buildah("push", "--quiet", name, to))
        self._say(f"{name}: imported ({travelled / 1e6:.0f} MB), {time.monotonic() - began:.0f} s")

    def _local_base(self) -> str:
        if LOCAL_BASE in self._names():
            return LOCAL_BASE
        self._say(f"{LOCAL_BASE}: made of Debian's packages once (about 2 minutes)")
        with tempfile.TemporaryDirectory(dir=self._scratch()) as folder:
            root = Path(folder) / "root"
            self._run("debootstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", "bookworm", str(root))
            for leftover in ("var/cache/apt", "var/lib/apt/lists"):
                shutil.rmtree(root / leftover, ignore_errors=True)
            container = self._buildah("from", "scratch").strip()
            try:
                self._buildah("add", "--quiet", container, str(root), "/")
                self._buildah("commit", "--quiet", container, LOCAL_BASE)
            finally:
                self._buildah("rm", container)
        return LOCAL_BASE

    def _scratch(self) -> Path:
        folder = self._folder / "scratch"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _buildah(self, *arguments: str) -> str:
        store = [f"--root={self._folder / 'storage'}", f"--runroot={self._folder / 'run'}", "--storage-driver=overlay"]
        return self._run("buildah", *store, *arguments)

    def _run(self, *command: str) -> str:
        environment = {**os.environ, "PATH": host.search_path(), "TMPDIR": str(self._scratch())}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=_BUILD_SECONDS, check=False
        )
        if done.returncode != 0:
            words = " ".join(w for w in command[:6] if not w.startswith("--root"))
            raise ClusterError(f"{words} ...:\n{(done.stdout[-2000:] + done.stderr[-3000:]).strip()}")
        return done.stdout


def stage_ends(said: str) -> dict[str, str]:
    """The last image of each stage, by the stage's number, from what ``buildah bud --layers`` says of its steps."""
    ends, stage = {}, ""
    for line in said.splitlines():
        if begun := re.match(r"\[(\d+)/\d+\] STEP ", line):
            stage = begun[1]
        elif stage and (made := re.fullmatch(r"--> ([0-9a-f]{11,64})", line.strip())):
            ends[stage] = made[1]
    return ends


def digest_of(context: Path, *more: str) -> str:
    """A hash over the sources of images in ``context`` (names, modes and bytes) and over ``more``."""
    total = hashlib.sha256()
    for name in SOURCES:
        top = context / name
        # An earlier release has no sources of what only later targets need.
        files = sorted(top.rglob("*")) if top.is_dir() else [top] if top.exists() else []
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                executable = bool(file.stat().st_mode & 0o100)
                bytes_ = hashlib.sha256(file.read_bytes()).hexdigest()
                total.update(f"{file.relative_to(context)}\0{executable}\0{bytes_}\n".encode())
    total.update("\0".join(more).encode())
    return total.hexdigest()


@contextmanager
def earlier() -> Iterator[Path]:
    """A build context with an earlier operator (fixtures/earlier.tar.gz) and today's dependencies."""
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder)
        with tarfile.open(Path(__file__).parent / "fixtures" / "earlier.tar.gz") as archive:
            archive.extractall(context, filter="data")
        for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "requirements.lock", "README.md", "LICENSE"):
            shutil.copy2(ROOT / name, context / name)
        shutil.copytree(ROOT / "images", context / "images")
        yield context


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    number, _, unit = size.partition(" ")
    return int(float(number) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit])


def ensure_pause(node: RealNode) -> None:
    """The container that holds a pod's namespaces: a few lines of C, so no image has to be pulled for it."""
    identity = hashlib.sha256(_PAUSE_SOURCE.encode()).hexdigest()
    if node.holds_image(PAUSE_IMAGE, identity):
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program, archive = (Path(folder) / n for n in ("pause.c", "pause", "pause.tar"))
        source.write_text(_PAUSE_SOURCE)
        host.run("gcc", "-Os", "-static", "-s", "-o", str(program), str(source))
        _write_archive(archive, PAUSE_IMAGE, program)
        node.import_image(lambda stream: copy(archive, stream), PAUSE_IMAGE, identity)


def _write_archive(archive: Path, name: str, program: Path) -> None:
    """An image of one file, in the format that ``docker save`` writes."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tar.gettarinfo(str(program), "pause")
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        entry.mode = 0o755
        with program.open("rb") as bytes_in:
            tar.addfile(entry, bytes_in)
    data = layer.getvalue()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, mode="w") as tar:
        for file, content in (
            ("config.json", json.dumps(config).encode()),
            ("layer.tar", data),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            member = tarfile.TarInfo(file)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
