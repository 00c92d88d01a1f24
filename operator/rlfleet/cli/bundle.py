"""Command support-bundle: what somebody who helps from afar needs, in one archive, without secrets.

Invariants:
- Secrets and ConfigMaps are never read; everything that is written has gone through ``redaction``;
- what may not be read is named in the archive, and keeps nothing else from being taken along.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rlfleet import __version__
from rlfleet.cli import operator as reach
from rlfleet.cli import options, tables
from rlfleet.cli.cluster import CORE, Cluster
from rlfleet.cli.doctor import drawn, examine
from rlfleet.cli.engines import engine_pods
from rlfleet.cli.failures import CliError, Exit
from rlfleet.cli.output import Format, dump, plain, show
from rlfleet.cli.redaction import redacted, text
from rlfleet.show.facts import document
from rlfleet.show.fleet import fleet
from rlfleet.show.rounds import rounds

#: Lines of each log that are taken along.
LOG_LINES = 2000
_README = """\
Made by rlfleet {version} (rlfleet support-bundle). Environment values, arguments that may be credentials and everything
that looks like a token, key or password are replaced by [redacted]; Secrets and ConfigMaps were not read.

  status.txt rounds.txt doctor.txt   what rlfleet status, rounds and doctor show
  objects/                           RLPipelines, EnginePools, SyncRounds, TrainerDemands, engine pods, events
  logs/                              last {lines} lines of the operator and of each engine pod's gate
  missing.txt                        what could not be read, and why
"""


def support_bundle(
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Where to write; default: rlfleet-support-TIME.tar.gz here."),
    ] = None,
    logs: Annotated[bool, typer.Option("--logs/--no-logs", help="Take logs of operator and gates along.")] = True,
    namespace: options.NamespaceOption = None,
    everywhere: options.EverywhereOption = False,
    output: options.OutputOption = Format.TABLE,
    operator: reach.UrlOption = None,
    token: reach.TokenOption = None,
    operator_namespace: reach.OperatorNamespaceOption = "rlfleet-system",
    kubeconfig: options.KubeconfigOption = None,
    context: options.ContextOption = None,
) -> None:
    """Write an archive for whoever helps: objects, status, doctor, events, logs; secrets are left out."""
    target = file or Path(time.strftime("rlfleet-support-%Y%m%d-%H%M%S.tar.gz"))
    with options.cluster(kubeconfig, context, namespace, everywhere=everywhere) as cluster:
        way = reach.Way(cluster, operator, token, operator_namespace, kubeconfig, context)
        files = collect(way, logs=logs)
    try:
        write(target, files)
    except OSError as e:
        raise CliError(f"can not write {target}: {e.strerror or e}; name another place with --file", Exit.USAGE) from e
    missing = files["missing.txt"].splitlines()
    if output in (Format.JSON, Format.YAML):
        dump({"file": str(target), "files": sorted(files), "missing": missing}, output)
        return
    left = f"; {len(missing)} things could not be read, see missing.txt in it" if missing else ""
    show(f"{target}: {len(files)} files, secrets left out{left}. Look through it before you hand it on")


def write(target: Path, files: dict[str, str]) -> None:
    """The archive, readable by its owner only."""
    with target.open("wb") as raw:
        target.chmod(0o600)
        with tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for name, content in sorted(files.items()):
                data = content.encode()
                info = tarfile.TarInfo(f"rlfleet-support/{name}")
                info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
                archive.addfile(info, io.BytesIO(data))


def collect(way: reach.Way, *, logs: bool) -> dict[str, str]:
    """File name -> content, all of it redacted."""
    cluster = way.cluster
    missing: list[str] = []
    files: dict[str, str] = {"README.txt": _README.format(version=__version__, lines=LOG_LINES)}

    def attempt(what: str, read: Callable[[], Any], default: Any) -> Any:
        try:
            return read()
        except CliError as e:
            missing.append(text(f"{what}: {e}".replace("\n", " ")))
            return default

    def listed(plural: str, selector: str = "", namespace: str | None = None) -> list[Any]:
        found: list[Any] = attempt(
            plural, lambda: cluster.list(plural, selector=selector, namespace=namespace), default=[]
        )
        return found

    kinds = ("rlpipelines", "enginepools", "syncrounds", "trainerdemands", "events")
    objects = {plural: listed(plural) for plural in kinds}
    objects["pods"] = attempt("pods", lambda: engine_pods(cluster), default=[])
    objects["operator-pods"] = listed("pods", "app.kubernetes.io/name=rlfleet", way.namespace)
    objects["nodes"] = [{"metadata": n["metadata"], "status": _node(n)} for n in listed("nodes")]
    for name, items in objects.items():
        files[f"objects/{name}.json"] = json.dumps(redacted(items), indent=1, sort_keys=True) + "\n"
    found = fleet(objects["rlpipelines"], objects["enginepools"], objects["syncrounds"])
    files["status.txt"] = text(plain(tables.status_tree(found, wide=True)))
    some = rounds(objects["syncrounds"])
    files["rounds.txt"] = text(plain(tables.rounds_table(some, options.now_ms(), wide=True, namespaces=True)))
    checks = attempt("doctor", lambda: examine(way), default=[])
    files["doctor.txt"] = text(plain(drawn(checks, wide=True)))
    files["doctor.json"] = json.dumps(redacted(document(checks)), indent=1) + "\n"
    if logs:
        for pod in objects["pods"]:
            _log(cluster, pod, "gate", files, attempt)
        for pod in objects["operator-pods"]:
            _log(cluster, pod, "operator", files, attempt)
        if not objects["operator-pods"] and not any(line.startswith("pods: ") for line in missing):
            missing.append(
                f"log of the operator: no pod in {way.namespace} has the label app.kubernetes.io/name=rlfleet: "
                "it runs outside the cluster, or elsewhere (--operator-namespace)"
            )
    files["missing.txt"] = "".join(f"{line}\n" for line in missing)
    return files


def _node(node: dict[str, Any]) -> dict[str, Any]:
    """What tells of devices and health; not the images and addresses of a machine."""
    status = node.get("status") or {}
    return {k: status[k] for k in ("allocatable", "capacity", "conditions", "nodeInfo") if k in status}


def _log(cluster: Cluster, pod: dict[str, Any], container: str, files: dict[str, str], attempt: Any) -> None:
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    path = f"{CORE}/namespaces/{namespace}/pods/{name}/log"

    def read() -> str:
        return cluster.text(path, params={"container": container, "tailLines": str(LOG_LINES)})

    said = attempt(f"log of {namespace}/{name} {container}", read, None)
    if said is not None:
        files[f"logs/{namespace}/{name}-{container}.log"] = text(said)
