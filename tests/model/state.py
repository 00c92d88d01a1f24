"""States of the explorer: plain tuples, small enough to be hashed millions of times.

One state is ``(World, columns)``. A column is everything about one engine: its process, its gate, its router entry,
what each operator last saw of it, and messages that still travel to it. Columns are kept sorted, so states that differ
only in the engines' numbers are one state (symmetry reduction).

Identity: an engine process is named by the number of its pod, plus PROCESS times its own number there (owned pods never
restart an engine in place, adopted ones do). Bytes are small numbers; GARBAGE is what a load that went wrong leaves
behind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BASE, OLD, GARBAGE = 0, 1, 99
#: Orders with a record in the gate's log, in the order of ``Column.log``.
STEPS = ("Pause", "Load", "Verify", "Publish", "Resume", "Open", "Close", "Release", "Wake")
PAUSE, LOAD, VERIFY, PUBLISH, RESUME, OPEN, CLOSE, RELEASE, WAKE = range(9)
#: The engine's memory by its gate's record (one tag stands for all).
HERE, RELEASING, RELEASED, WAKING = range(4)
#: The number of work outside rounds: it puts engines to sleep, wakes, shuts or mends them.
ELASTIC = 7
#: The kinds of that work.
OUTSIDE = ("Offload", "Wake", "Over", "Quarantine", "Mend")
#: Beside the pod's number in an identity: that of the process that the gate's record is about.
PROCESS = 100
#: States of a record in the log.
NONE, RUNNING, DONE, FAILED = range(4)
#: What an operator has of a call: nothing to do, to be called, started and awaited; then its result.
IDLE, CALL, AWAIT = range(3)
OK, NOT_OK = 1, 2

Answer = tuple[Any, ...]


class View(NamedTuple):
    """What an operator last saw of one engine: the pod from the apiserver, the status from the gate."""

    pod: int = -1  # -1: no such pod
    gone: int = 0
    status: Answer = ()  # (): the gate gave no answer
    refused: int = 0  # the generation that the gate refused us with
    rest: int = 0  # it is to sleep
    leaving: int = 0  # somebody asked the pod to go
    shut: int = 0  # a person keeps its engine out of service
    shown: int = 0  # the engine process that the kubelet tells of


class Life(NamedTuple):
    """What befalls one engine, beside rounds. Processes are counted from 0 in each pod."""

    leaving: int = 0  # evicted or preempted, and not gone yet
    shut: int = 0  # in a person's quarantine
    shared: int = 0  # it lies on the device that the trainer demands
    process: int = 0  # the process that is there
    shown: int = 0  # the one that the kubelet tells of
    told: int = 0  # the one that the gate was told of
    about: int = 0  # the one that the gate's record, and so its incarnation, is about
    booting: int = 0  # the process does not answer yet
    fresh: int = 0  # it started behind an open router, and was not closed since: an adopted pod can not help that


class Column(NamedTuple):
    """One engine with all that belongs to it."""

    # engine process and router
    pod: int = 1
    alive: int = 1
    admit: int = 1
    bytes: int = OLD
    label: int = 0
    routed: int = 1
    late: int = 0  # an addition still travels to the router
    pend: int = -1  # step whose effect the engine has not carried out yet
    pend_bytes: int = -1  # what a load that is not carried out yet will leave
    # gate, durable
    up: int = 1
    fence: tuple[int, int] = (0, -1)  # generation, operation
    paused: int = 0
    holds: tuple[int, int, int] | tuple[()] = (0, OLD, OLD)  # version, bytes, bytes that were verified
    load: Answer = ()  # operation, version, bytes, record state, verified, published
    before: tuple[int, int] = (-1, -1)  # bytes in the engine, and proven, before that load
    log: tuple[int, ...] = (0,) * 9  # attempt * 4 + state, per step, of the fence's operation
    current: int = -1  # step that runs
    unsettled: int = 0  # 1: an engine order, 2: a routing order has no known end
    adding: int = 0  # an addition was asked for and its end is not known
    staged: tuple[int, int] | tuple[()] = ()  # operation, bytes
    memory: int = HERE
    voided: int = 0  # memory was released since the load of ``load``
    rest: int = 0  # its pool wants it asleep
    life: Life = Life()
    # what others know of it
    member: tuple[int, ...] = ()  # per round: pod number, 0 not a member, negative: it could not be one (decide.SILENT)
    views: tuple[View, ...] = ()
    todo: tuple[int, ...] = ()
    result: tuple[int, ...] = ()
    wire: tuple[Answer, ...] = ()  # messages still on their way to this address

    @property
    def identity(self) -> int:
        """Pod and incarnation, as the gate tells them."""
        return self.pod + PROCESS * self.life.about


class Pipeline(NamedTuple):
    """RLPipeline.status."""

    fence: int = 0
    active: Answer = ()  # kind, round, generation, holder, committed
    committed: tuple[int, int] | tuple[()] = (0, OLD)  # version, bytes
    grants: tuple[tuple[int, int], ...] = ()  # step of a demand, whether it is granted


class Round(NamedTuple):
    """SyncRound.status; ``bytes`` -1: not planned."""

    phase: str = "Pending"
    lease: int = 0
    bytes: int = -1
    exists: int = 1


class Sender(NamedTuple):
    """The weight sender: which process it is and what it holds for whom."""

    incarnation: int = 1
    hold: int = -1
    fence: tuple[int, int] = (0, -1)


class Operator(NamedTuple):
    """One operator process. ``seen`` and ``round`` are what it read last; the flags say whether nothing was written
    since (the resourceVersion still matches)."""

    pc: str = "down"
    generation: int = 0
    work: int = -1  # round number
    seen: Pipeline = Pipeline()
    seen_fresh: int = 0
    round: Round = Round()
    round_fresh: int = 0
    sender: Answer = ()  # incarnation, hold; (): no answer
    takeover: int = 0
    barrier: Answer = ()
    arg: Answer = ()  # of the step


class Budget(NamedTuple):
    """Faults that may still happen."""

    total: int = 0
    crash: int = 0
    rival: int = 0
    thaw: int = 0  # steps that an operator takes after it lost the Lease; no fault of its own, not in ``total``
    lost: int = 0
    duplicate: int = 0
    delay: int = 0
    slow: int = 0
    bad: int = 0
    gate: int = 0
    kill: int = 0
    wipe: int = 0
    sender: int = 0
    silence: int = 0
    cancel: int = 0
    remove: int = 0
    wish: int = 0  # the user changes spec.active
    evict: int = 0
    restart: int = 0  # an adopted pod's engine starts again in place
    shut: int = 0  # a person sets or takes back a quarantine
    demand: int = 0  # the trainer demands the device, or gives it back


class World(NamedTuple):
    """All that belongs to no single engine. ``truth``: the bytes last committed, whatever became of the status."""

    pipeline: Pipeline
    rounds: tuple[Round, ...]
    sender: Sender
    operators: tuple[Operator, ...]
    budget: Budget
    truth: int = OLD
    highest: int = 0  # generation claimed so far
    pods: int = 0  # pods made so far
    cancelled: int = 0  # bit per round
    decided: int = 0  # the highest generation whose holder has passed its barrier
    leader: int = 0  # who holds the leader Lease
    demand: int = 0  # the step for which the trainer demands the device; 0: for none
    steps: int = 0  # demands so far
    wrong: str = ""  # what an invariant over steps found


State = tuple[World, tuple[Column, ...]]


class Scope(NamedTuple):
    """What is explored. ``versions``: per round (version, sender incarnation); ``bytes_of``: (incarnation, version) ->
    bytes number, as pairs."""

    name: str
    budget: Budget
    engines: int = 3
    versions: tuple[tuple[int, int], ...] = ((1, 1),)
    bytes_of: tuple[tuple[tuple[int, int], int], ...] = (((1, 1), 2), ((1, 2), 3), ((2, 1), 4), ((2, 2), 5))
    max_unavailable: int = 0
    on_failure: str = "Replace"
    clock: bool = True  # the apiserver's clock is ahead of every claim
    slow_steps: tuple[int, ...] = (LOAD, RESUME)
    columns: tuple[Column, ...] = ()  # other than three engines that serve OLD
    committed: tuple[int, int] | tuple[()] = (0, OLD)
    bad_loads: tuple[str, ...] = ("failed", "garbage", "nothing", "unknown")
    elastic: bool = False  # engines are put to sleep and woken between rounds
    later: bool = False  # no round is there at the beginning
    grants: tuple[tuple[int, int], ...] = ()  # a demand that stands at the beginning
    strict: bool = False  # no request is lost here, so whoever was asked has answered

    @property
    def watches(self) -> bool:
        """Engines are looked after between rounds."""
        return bool(self.elastic or self.budget.shut or self.demands)

    @property
    def mends(self) -> bool:
        """Between rounds the operator repairs engines, too."""
        return bool(self.budget.shut or self.demands)

    @property
    def demands(self) -> bool:
        """A trainer demands the device that engines share."""
        return bool(self.budget.demand or self.grants)

    @property
    def drops(self) -> bool:
        """Members may be dropped on purpose."""
        return bool(self.watches or self.budget.evict or self.budget.restart)

    def initial(self) -> State:
        """Everything in order, the rounds just created, one operator about to look."""
        n = len(self.versions)
        base = self.columns or (Column(),) * self.engines
        columns = []
        for i, c in enumerate(base):
            columns.append(
                c._replace(
                    pod=i + 1 if c.pod == 1 else c.pod,
                    member=c.member or (0,) * n,
                    views=(View(),) * 2,
                    todo=(IDLE,) * 2,
                    result=(0,) * 2,
                )
            )
        world = World(
            pipeline=Pipeline(0, (), self.committed, self.grants),
            # Later ones are ordered later.
            rounds=(Round("New", exists=0) if self.later else Round(), *(Round(phase="New", exists=0),) * (n - 1)),
            sender=Sender(),
            operators=(Operator(pc="top"), Operator()),
            budget=self.budget,
            truth=self.committed[1] if self.committed else BASE,
            pods=len(base),
            demand=self.grants[0][0] if self.grants else 0,
            steps=self.grants[0][0] if self.grants else 0,
        )
        return normal(world, tuple(columns))

    def content(self, incarnation: int, version: int) -> int | None:
        """The bytes that a sender process holds under a version."""
        return dict(self.bytes_of).get((incarnation, version))


def normal(world: World, columns: tuple[Column, ...]) -> State:
    """The representative of all states that differ in the engines' numbers only."""
    return world, tuple(sorted(columns))
