"""The colocated scenario: trainer and engines share all devices and take turns on them.

Invariant: what is promised at the end is read from where it happened. That engines were really asleep during a train
step is shown by the trainer, which takes more device memory than is free beside an engine that is awake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from e2e.cluster.local import ROOT
from e2e.demo import leg, proof, report
from e2e.demo.report import Check
from e2e.demo.run import print_logs
from e2e.demo.stage import MANIFESTS, NAMESPACE, Say, Stage

ENGINES = 2
_AWAKE_SECONDS = 60.0

_BANNER = """\
rlfleet demo, colocated: trainer and engines share all GPUs and take turns on them.

  *** THE GPUs ARE SIMULATED, but their memory is counted for real: an engine takes 64 of 80 GiB, the trainer 60. ***
  Real: control plane, the scheduler's allocation of the ResourceClaim, operator, gates, sender, router, training.
  Not real: kubelet and containers (host processes), GPUs, the model's size, SGLang itself (a reference engine).
"""


def play(stage: Stage, versions: int, say: Say) -> bool:
    """Run everything and print the table; returns whether all promises hold. Raises DemoError, ClusterError."""
    print(_BANNER, flush=True)
    stage.up()
    say("operator started under its own service account")
    stage.apply(MANIFESTS / "namespace.yaml")
    stage.cluster.kubectl("wait", "--for=create", "serviceaccount/default", f"--namespace={NAMESPACE}", "--timeout=60s")
    stage.apply(ROOT / "docs/examples/trainer-rbac.yaml", MANIFESTS / "colocated.yaml")
    say(f"RLPipeline demo with one train block, EnginePool engines with {ENGINES} engines in its slots")
    trained = leg.colocated(stage, versions, say)
    stage.wait("all engines awake again", lambda: _active(stage) == ENGINES, _AWAKE_SECONDS, "trainer", "router")
    rounds = [r for r in stage.items("syncrounds") if r["spec"]["pipeline"] == "demo"]
    say("asking every engine for its checksum, and one more engine that loads the final weights from disk")
    assert trained.checkpoint is not None
    log = stage.cluster.state / "engine-from-disk.log"
    proven = proof.prove(leg.engine_addresses(stage), trained.checkpoint, log, stage.environment)

    print("\nSTEPS: seconds until the GPUs were free, of training, of the sync while all engines slept")
    print(*table(trained.lines), sep="\n")
    print("\n$ kubectl get rlfleet -n demo")
    print(stage.cluster.kubectl("get", "rlfleet", "--namespace", NAMESPACE), flush=True)
    found = checks(trained, versions, rounds, proven)
    print("\nPROMISES", *report.check_table(found), sep="\n", flush=True)
    broken = [c for c in found if not c.holds]
    print(f"\n{'DEMO FAILED: ' + str(len(broken)) + ' promise(s) broken' if broken else 'DEMO OK'}", flush=True)
    if broken:
        print_logs(stage)
    return not broken


def _active(stage: Stage) -> int:
    counts = (stage.one("enginepool", "engines").get("status") or {}).get("counts") or {}
    return int(counts.get("active") or 0)


def table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per step."""
    out = ["version   GPUs free   train    sync   reward"]
    out += [
        f"{line['version']:>7}   {line['gpuSeconds']:>9.1f} {line['trainSeconds']:>7.2f} {line['syncSeconds']:>7.2f}   "
        f"{line['meanReward']:.3f}"
        for line in lines
        if "meanReward" in line
    ]
    return out


def checks(trained: leg.Leg, versions: int, rounds: Sequence[Mapping[str, Any]], proven: proof.Proof) -> list[Check]:
    """What this scenario promises."""
    refreshes = [r for r in rounds if r["spec"]["kind"] == "Refresh" and int(r["spec"]["version"]) >= 0]
    asleep = [r for r in refreshes if _members(r) == 0 and r["status"].get("outcome") == "Succeeded"]
    caught_up = [r for r in rounds if r["spec"]["kind"] == "CatchUp" and r["status"].get("outcome") == "Succeeded"]
    committed = report.committed_versions(refreshes)
    difference = trained.logprob_difference
    steps = [line for line in trained.lines if "gpuSeconds" in line]
    return [
        Check(
            "every step got all GPUs: the trainer took memory that engines have while they are awake",
            len(steps) == versions,
            f"{len(steps)} of {versions} steps",
        ),
        Check(
            "every version is committed while all engines sleep",
            len(asleep) == len(refreshes) and committed == set(range(versions)),
            f"{len(asleep)} of {versions}",
        ),
        Check("engines that woke caught up between the rounds", bool(caught_up), f"{len(caught_up)} CatchUps"),
        Check(
            f"the mean reward rises by at least {report.REWARD_GAIN}",
            report.reward_rises(trained.curve),
            f"{trained.curve[0]:.3f} -> {trained.curve[-1]:.3f}",
        ),
        Check(
            f"engines' log-probabilities are those of the weights they claim, within {report.LOGPROB_TOLERANCE:g}",
            difference is not None and difference <= report.LOGPROB_TOLERANCE,
            "no samples" if difference is None else f"largest difference {difference:.1e}",
        ),
        Check(
            "weights proven: each engine's checksum equals that of an engine that loaded the final weights from disk",
            proven.holds,
            f"{sum(v == proven.from_disk for v in proven.engines.values())} of {len(proven.engines)}",
        ),
    ]


def _members(r: Mapping[str, Any]) -> int:
    plan = (r.get("status") or {}).get("plan") or {}
    return int(plan.get("serialized") or 0) + int(plan.get("broadcast") or 0)
