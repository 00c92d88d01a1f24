"""The operator as a person reaches it: through ``kubectl port-forward``, with a token of one's own.

Invariant: the token is sent to the operator's page only, over the forwarded port or to the URL that the user named; the
operator itself checks it at the apiserver.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import httpx
import typer

from rlfleet.cli import checks, options
from rlfleet.cli.cluster import Cluster, Obj
from rlfleet.cli.failures import CliError, Exit

#: Port of the page in the operator's pod (setting --web-bind).
WEB_PORT = 9470
LEASE = "rlfleet-operator"
FORWARD_SECONDS = 20.0
LOOK_SECONDS = 60.0
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--operator",
        metavar="URL",
        envvar="RLFLEET_OPERATOR",
        help="Where the operator's page is reached; default: kubectl port-forward to the leader's pod.",
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="TOKEN", envvar="RLFLEET_TOKEN", help="Your bearer token; default: the kubeconfig's."
    ),
]
OperatorNamespaceOption = Annotated[
    str,
    typer.Option(
        "--operator-namespace", metavar="NAME", envvar="RLFLEET_NAMESPACE", help="Namespace that the operator runs in."
    ),
]


@dataclass(frozen=True, slots=True)
class Way:
    """How to get to the operator."""

    cluster: Cluster
    url: str | None
    token: str | None
    namespace: str
    kubeconfig: str | None
    context: str | None
    problem: CliError | None = None
    """Why there is no way, once that was found out."""


@contextmanager
def opened(way: Way) -> Iterator[Way]:
    """The way, made once for many looks; where it can not be made, every look says why."""
    with ExitStack() as stack:
        try:
            made = replace(way, url=stack.enter_context(_reached(way)))
        except CliError as e:
            made = replace(way, problem=e)
        yield made


def look(way: Way, namespace: str, pipeline: str, **wanted: str) -> dict[str, Any]:
    """What the operator observes of a pipeline now; with ``version``, what a sync to it would do."""
    token = way.token or way.cluster.bearer()
    if token is None:
        raise CliError(
            "the operator wants a bearer token, and this kubeconfig logs in without one (by certificate): give "
            f'--token "$(kubectl create token NAME -n {namespace})", with a ServiceAccount NAME that may read '
            "rlpipelines, enginepools, syncrounds and pods there",
            Exit.FORBIDDEN,
        )
    if way.problem is not None:
        raise way.problem
    with _reached(way) as url:
        try:
            answer = httpx.get(
                f"{url}/api/look",
                params={"namespace": namespace, "pipeline": pipeline, **wanted},
                headers={"Authorization": f"Bearer {token}"},
                timeout=LOOK_SECONDS,
                trust_env=False,
            )
        except (httpx.TransportError, httpx.InvalidURL) as e:
            raise CliError(
                f"the operator does not answer at {url}: {e or type(e).__name__}. Is --operator right, and the page "
                "served (operator setting --web-bind)?",
                Exit.UNREACHABLE,
            ) from e
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if answer.status_code == 200 and isinstance(body, dict):
        return body
    said = str(body.get("error") or f"HTTP {answer.status_code}") if isinstance(body, dict) else "no JSON"
    code = {401: Exit.FORBIDDEN, 403: Exit.FORBIDDEN, 404: Exit.NOT_FOUND, 400: Exit.USAGE}.get(answer.status_code)
    raise CliError(f"the operator at {url}: {said}", code or Exit.UNREACHABLE)


@contextmanager
def _reached(way: Way) -> Iterator[str]:
    if way.url:
        yield way.url.rstrip("/")
        return
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise CliError(
            "kubectl is not on the PATH: install it, or forward the port and give --operator URL", Exit.USAGE
        )
    pod = leader(way)
    flags = [f"--{k}={v}" for k, v in (("kubeconfig", way.kubeconfig), ("context", way.context)) if v]
    process = subprocess.Popen(
        [kubectl, *flags, "port-forward", "-n", way.namespace, f"pod/{pod}", f":{WEB_PORT}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # It ends by itself only when it fails; a hang is ended, and read like a failure.
    timer = threading.Timer(FORWARD_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        match = _FORWARDING.search(process.stdout.readline())
        timer.cancel()
        if match is None:
            process.kill()
            said = process.communicate()[1].strip()
            if "(NotFound)" in said:
                raise CliError(
                    f"{pod} leads, by the Lease, and is no pod in namespace {way.namespace}: an operator that runs "
                    "outside the cluster is reached by --operator URL (on its own machine http://127.0.0.1:"
                    f"{WEB_PORT}, see --web-bind); a pod that has just gone is followed by another in a moment",
                    Exit.UNREACHABLE,
                )
            raise CliError(
                f"kubectl port-forward to pod {way.namespace}/{pod} failed: {said or 'no answer in time'}. You need "
                "the verb create on pods/portforward there; or give --operator URL",
                Exit.UNREACHABLE,
            )
        yield f"http://127.0.0.1:{match[1]}"
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def leadership(cluster: Cluster, namespace: str, missing: checks.Level = checks.Level.FAIL) -> checks.Check:
    """Whether an operator leads, by its Lease and the apiserver's clock. CliError: it can not be read.

    ``missing``: what it means that there is no Lease; one that runs without an election has none.
    """
    found: Obj | None = None
    try:
        found = cluster.get("leases", LEASE, namespace=namespace)
    except CliError as e:
        if e.code is not Exit.NOT_FOUND:
            raise
    check = checks.lease(found, options.now_ms() - (cluster.ahead_ms or 0), namespace)
    return check if found is not None else replace(check, level=missing)


def leader(way: Way) -> str:
    """Name of the pod that leads, by the Lease."""
    try:
        lease = way.cluster.get("leases", LEASE, namespace=way.namespace)
    except CliError as e:
        raise CliError(
            f"who leads is not known: {e}. Is the operator in another namespace (--operator-namespace)? Or forward the "
            "port yourself and give --operator URL",
            e.code,
        ) from e
    holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
    if not holder:
        raise CliError(
            f"nobody holds Lease {way.namespace}/{LEASE}: no operator runs there; start one, or name the namespace of "
            "another with --operator-namespace",
            Exit.UNREACHABLE,
        )
    return holder.split("_", 1)[0]
