"""Brings an image from buildah's store into containerd's: of a large one only what containerd lacks travels.

The trainer's image is gigabytes, of which a change of our sources touches a few megabytes. buildah leaves out of an OCI
layout what lies there already; so one is prepared in which every layer that containerd holds lies as an empty file of
its size. What buildah wrote goes to containerd as a stream, the rest is there. But it compresses what it writes there,
which takes minutes for gigabytes: an image of which much is new goes as a whole, as it is.

Invariant: containerd verifies each blob by its digest, and unpacking fails where one is missing: a layer that vanished
in between is an error, never another image.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from e2e.node.cluster import RealNode

#: Where containerd looks for the name of an imported image.
_NAME = "io.containerd.image.name"
#: How many times more must be there than is new.
_WORTH = 4


@dataclass(frozen=True)
class Built:
    """An image in buildah's store. ``layers``: sha256 (hex) of each, unpacked; ``size``: bytes of all of them."""

    name: str
    identity: str
    size: int
    layers: tuple[str, ...]


def bring(node: RealNode, image: Built, folder: Path, push: Callable[[str], object]) -> int:
    """Imports an image, which ``push`` writes to a destination of buildah's. Returns how many bytes travelled."""
    held = {layer: size for layer, size in node.blobs().items() if layer in image.layers}
    there = sum(held.values())
    if there > _WORTH * (image.size - there):
        return _what_lacks(node, image, held, folder / "layout", push)
    archive = folder / "image.tar"
    push(f"docker-archive:{archive}:{image.name}")
    node.import_image(lambda stream: copy(archive, stream), image.name, image.identity)
    return archive.stat().st_size


def copy(archive: Path, stream: IO[bytes]) -> None:
    """Writes a file to a stream."""
    with archive.open("rb") as source:
        shutil.copyfileobj(source, stream, 1 << 20)


def _what_lacks(node: RealNode, image: Built, held: dict[str, int], folder: Path, push: Callable[[str], object]) -> int:
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    inodes: dict[Path, int] = {}
    for layer, size in held.items():
        path = blobs / layer
        with path.open("wb") as file:
            file.truncate(size)
        inodes[path] = path.stat().st_ino
    push(f"oci:{folder}")
    index = folder / "index.json"
    found = json.loads(index.read_text())
    (entry,) = found["manifests"]
    entry["annotations"] = {_NAME: image.name}
    index.write_text(json.dumps(found))
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and inodes.get(p) != p.stat().st_ino]

    def write(stream: IO[bytes]) -> None:
        with tarfile.open(fileobj=stream, mode="w|") as tar:
            for file in files:
                tar.add(file, str(file.relative_to(folder)), recursive=False)

    node.import_image(write, image.name, image.identity)
    return sum(file.stat().st_size for file in files)
