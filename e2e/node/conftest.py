"""One real node for the whole run, with the images built from this checkout and one of an older operator."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.controlplane import ClusterError
from e2e.node.__main__ import wants_install
from e2e.node.cluster import RealNode
from e2e.node.images import TARGETS, Builder, earlier, name_of
from e2e.node.kit import EARLIER_TAG


def say(line: str) -> None:
    """Progress: the run is long, and mostly waits for builds on a new machine."""
    print(line, flush=True)


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    """The node, with every image in its store. Needs root and Debian's packages (ClusterError names what lacks)."""
    builder = Builder(say, install=wants_install())
    if missing := set(TARGETS) - set(builder.built()):
        raise ClusterError(f"no image of {', '.join(sorted(missing))}: 'make image' first ('make e2e-node' does both)")
    with earlier() as context:
        builder.build(["operator"], context=context, tag=EARLIER_TAG)
    with RealNode(tmp_path_factory.mktemp("node"), say, install=wants_install()) as started:
        for target in TARGETS:
            builder.load(started, name_of(target))
        builder.load(started, name_of("operator", EARLIER_TAG))
        yield started


@pytest.fixture(scope="session")
def earlier_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart of that release. It had no Deployment yet: a plain one is added."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(Path(__file__).parent / "fixtures" / "earlier.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    chart = folder / "charts" / "rlfleet"
    added = Path(__file__).parent / "fixtures" / "deployment.yaml"
    (chart / "templates" / "deployment.yaml").write_text(added.read_text())
    return chart
