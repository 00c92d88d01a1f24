"""Scenarios of the other ways that weights travel, and of devices that the scheduler allocates for a train block."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any, ClassVar

from e2e.cluster.hollow.nodes import DRIVER
from e2e.cluster.local import ClusterError
from e2e.scenarios.kit import condition
from rlfleet.api import wire
from tests.fault.scenarios import Arm, Round, Scenario, State, everybody_serves
from tests.fault.stand import Stand

_PAUSE = "pause_generation"


class Stream(Round):
    """A round whose weights never lie whole at a gate: each bucket is loaded before the next one is pushed."""

    name = "stream"
    _transport: ClassVar[State] = {"mode": "CPUSerialize", "backend": "gloo", "bucketMiB": 1, "staging": "Bucket"}

    def begin(self, arm: Arm) -> None:
        self.stand.apply_pipeline(transport=self._transport)
        super().begin(arm)

    def order(self) -> None:
        # Two buckets of 1 MiB and that of the model.
        self.round = self.stand.order_next(bulk=2)

    def leave(self) -> None:
        self.stand.apply_pipeline()


class Checkpoints(Round):
    """A round from a checkpoint: no sender, engines load what a trainer wrote to a folder that they mount."""

    name = "checkpoint"
    stand_options: ClassVar[State] = {"checkpoints": True}


class Ports(Round):
    """A broadcast whose port somebody else listens on: the round claims another one."""

    name = "port-in-use"
    most_stands: ClassVar[int] = 2
    _ports: ClassVar[State] = {"first": 29510, "last": 29513}
    stand_options: ClassVar[State] = {
        "backend": "torch",
        "pipeline": {
            "transport": {"mode": "Broadcast", "backend": "gloo", "rendezvousPorts": _ports},
            "trainer": {"gpus": [{"node": "hollow-000", "devices": ["GPU-train-0"]}]},
            "sync": {"deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 40}},
        },
        "pool": {
            "placement": {
                "mode": "Pinned",
                "devices": [{"node": "hollow-000", "devices": ["GPU-free-0", "GPU-free-1"]}],
            }
        },
    }

    def __init__(self, stand: Stand) -> None:
        super().__init__(stand)
        self._taken: socket.socket | None = None

    def prepare(self) -> None:
        self.leave()
        super().prepare()

    def begin(self, arm: Arm) -> None:
        for pod in self.fleet.engines():
            # The sender is asked to listen when all are paused: by then the port is in use.
            self.fleet.fault(pod, _PAUSE, action="delay", seconds=1, times=1, when="before")
        arm()
        self.order()
        operation = self.fleet.get("syncround", self.round)["metadata"]["uid"]
        self._take(self._first_choice(operation))

    def _first_choice(self, operation: str) -> int:
        """The port that a round looks at first (``control.rounds.rendezvous``)."""
        first, last = self._ports["first"], self._ports["last"]
        begin = int(wire.operation_id(operation, "port", 0, "")[:6], 16)
        return int(first) + begin % (int(last) - int(first) + 1)

    def _take(self, port: int) -> None:
        self._taken = socket.socket()
        self._taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._taken.bind((self.fleet.pod("trainer")["status"]["podIP"], port))
        self._taken.listen()

    def next_step(self) -> None:
        self.leave()
        super().next_step()

    def leave(self) -> None:
        if self._taken is not None:
            self._taken.close()
            self._taken = None

    def end_state(self) -> State:
        claims = self.fleet.status("rlpipeline", "p").get("rendezvousClaims")
        return super().end_state() | {"ports": len(claims or [])}


class Blocks(Scenario):
    """A train block comes, and with it its claim and a pool on its devices; both go again, and the claim with them."""

    name = "train-block"
    _block: ClassVar[State] = {"name": "b", "deviceClassName": DRIVER, "slots": 1}

    def prepare(self) -> None:
        # What a run left that came to no good end.
        self._remove()
        super().prepare()

    def begin(self, arm: Arm) -> None:
        self.shared = False
        arm()
        self.stand.apply_pipeline(trainer={"blocks": [self._block]})
        self.fleet.pool(1, name="shared", placement={"mode": "Claims", "blocks": ["b"]})

    def drive(self) -> None:
        if not self.shared and self._serves():
            self.shared = True
            self._remove()

    def _serves(self) -> bool:
        status = self.fleet.status("enginepool", "shared")
        return (
            int((status.get("counts") or {}).get("active") or 0) == 1 == status.get("readyReplicas")
            and condition(self.fleet.get("rlpipeline", "p"), "Ready") == "True"
            and not self.fleet.status("rlpipeline", "p").get("activeOperation")
        )

    def _remove(self) -> None:
        with suppress(ClusterError):
            self.fleet.cluster.kubectl("delete", "enginepool", "shared", "-n", self.fleet.namespace, "--wait=false")
        self.stand.apply_pipeline()

    def over(self) -> bool:
        forgotten = not self.fleet.status("rlpipeline", "p").get("blocks")
        return self.shared and forgotten and not self._left() and everybody_serves(self.stand)

    def _left(self) -> list[Any]:
        fleet = self.fleet
        found = fleet.cluster.get("resourceclaims", "-n", fleet.namespace)["items"]
        found += fleet.cluster.get("enginepools", "-n", fleet.namespace)["items"]
        return [o["metadata"]["name"] for o in found if o["metadata"]["name"] != "e"]

    def leave(self) -> None:
        self._remove()

    def end_state(self) -> State:
        rows = self.fleet.status("rlpipeline", "p").get("blocks")
        return super().end_state() | {"left": self._left(), "blocks": len(rows or [])}
