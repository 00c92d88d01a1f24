"""The demo's course: stage up, a training leg with syncs, one without, the proof, and the verdict."""

from __future__ import annotations

import os
import sys

from e2e.cluster.local import ROOT
from e2e.demo import leg, proof, report
from e2e.demo.real import Real
from e2e.demo.stage import MANIFESTS, NAMESPACE, Say, Stage

RBAC = ROOT / "docs/examples/trainer-rbac.yaml"
_CREATED_SECONDS = 60.0

_BANNER = """\
rlfleet demo: a trainer learns, and after every step its new weights travel into all running engines.

  *** THE GPUs ARE SIMULATED. Nodes and devices exist as names only; engines and trainer compute on this CPU. ***
  Real: Kubernetes control plane, operator, gates, weight sender, gloo broadcast, sglang-router, the training.
  Not real: kubelet and containers (host processes), GPUs, the model's size, SGLang itself (a reference engine).
"""


def play(stage: Stage, versions: int, unsynced_versions: int, say: Say, real: Real | None = None) -> bool:
    """Runs everything and prints the tables; returns whether all promises hold. Raises DemoError, ClusterError.

    ``real``: the engine that runs in place of the reference engine.
    """
    print(real.banner if real else _BANNER, flush=True)
    stage.up()
    say("operator started under its own service account")
    stage.apply(MANIFESTS / "namespace.yaml")
    stage.cluster.kubectl("wait", "--for=create", "serviceaccount/default", f"--namespace={NAMESPACE}", "--timeout=60s")
    stage.apply(RBAC, MANIFESTS / "pipeline.yaml", MANIFESTS / "pool.yaml")
    each = 1 if real else 2
    say(
        f"RLPipeline demo and EnginePool engines created: {each} on the trainer's (simulated) devices, {each} elsewhere"
    )
    synced = leg.synced(stage, versions, say)
    rounds = [r for r in stage.items("syncrounds") if r["spec"]["pipeline"] == "demo"]
    # The second leg's engine starts meanwhile.
    stage.apply(MANIFESTS / "unsynced.yaml")
    compared = real.compared if real else "checksum"
    say(f"asking every engine for its {compared}, and one more engine that loads the final weights from disk")
    assert synced.checkpoint is not None
    if real:
        proven = real.prove(stage, synced.checkpoint)
    else:
        log = stage.cluster.state / "engine-from-disk.log"
        proven = proof.prove(leg.engine_addresses(stage), synced.checkpoint, log, stage.environment)
    proven_text = "equal" if proven.holds else "NOT EQUAL"
    say(f"{compared} of {len(proven.engines)} engines and the one from disk: {proven_text}")
    say(f"second leg: {unsynced_versions} versions without syncs; its reward check must fail")
    unsynced = leg.unsynced(stage, unsynced_versions, say)

    print("\nROUNDS: bytes and milliseconds per version; reward: mean of the samples from that version")
    print("(the lines above have that of the samples which the version was trained on)")
    print(*report.round_table(rounds, report.rewards_by_version(synced)), sep="\n")
    shared, others = ("engine 0 shares", "1 does") if real else ("engines 0 and 1 share", "2 and 3 do")
    print(f"transports: {shared} SIMULATED devices with the trainer (serialized), {others} not (broadcast)")
    print("\n$ kubectl get rlfleet -n demo")
    print(stage.cluster.kubectl("get", "rlfleet", "--namespace", NAMESPACE), flush=True)
    print("REQUESTS: sent through the router all the time, never retried")
    print(
        *(f"  {name}: {synced.books.get(name)}" for name in ("sent", "answered", "failed", "crossing", "retracted")),
        f"  answered by a version that was never committed: "
        f"{sum(report.never_committed(synced.books, report.committed_versions(rounds)).values())}",
        f"  slowest: {synced.books.get('slowestSeconds')} s (requests wait inside paused engines)",
        sep="\n",
    )
    found = report.checks(synced, unsynced, versions, rounds, proven, mix=(each, each), compared=compared)
    print("\nPROMISES", *report.check_table(found), sep="\n", flush=True)
    broken = [c for c in found if not c.holds]
    print(f"\n{'DEMO FAILED: ' + str(len(broken)) + ' promise(s) broken' if broken else 'DEMO OK'}", flush=True)
    if broken:
        print_logs(stage)
    return not broken


def print_keep(stage: Stage) -> None:
    """What to do with a fleet that is left running."""
    program = stage.cluster.program("kubectl")
    print(
        "",
        "KEEP=1: everything is left running. Worth trying:",
        f"  export KUBECONFIG={stage.cluster.kubeconfig}",
        f"  export PATH={program.parent}:$PATH",
        f"  kubectl get rlfleet -n {NAMESPACE} -o wide",
        f"  kubectl describe rlp demo -n {NAMESPACE}",
        f"  kubectl scale epool/engines -n {NAMESPACE} --replicas=3    # the last engine drains and goes",
        f"  kubectl delete pod -n {NAMESPACE} -l rlfleet.dev/pool=engines,rlfleet.dev/engine-index=0    "
        "# replaced; the new engine catches up while the trainer holds the version",
        "  kubectl explain syncrounds.status.timings",
        "Stop it and remove everything:",
        f"  cd {ROOT} && {os.path.relpath(sys.executable, ROOT)} -m e2e.cluster down --state {stage.cluster.state}",
        sep="\n",
        flush=True,
    )


def print_logs(stage: Stage) -> None:
    """The last lines of everything that looks wrong."""
    for title, lines in stage.logs():
        print(f"--- {title}", *lines, sep="\n    ", file=sys.stderr)
