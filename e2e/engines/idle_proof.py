"""What a restarted gate can prove about a real engine: does an idle proof ever come before the effect of a lost call?

A gate that restarts finds operations without a recorded end. It may go on only once nothing asked before can still
change the engine (DESIGN section 5, Gate restart). This program plays a gate that dies after each kind of call and asks
a real SGLang or vLLM server the questions that its successor would ask. docs/decisions/0022 holds what came out.

Invariant: nothing here is a timing assertion; a proof that came too early is found by reading the engine once more.

Usage, in a network namespace of its own (torch stores listen on every address):
``python -m e2e.engines.idle_proof {sglang|vllm} URL MODEL_A MODEL_B [TRIALS]`` with two checkpoints of one shape, of
which the server runs A. Ends with 1 if any proof came before the effect of a call that a gate may make.
"""

from __future__ import annotations

import datetime
import http.client
import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as torch_distributed
from safetensors.torch import load_file

dist: Any = torch_distributed
GROUP = "idle-proof"
#: Seconds that a rendezvous may take.
TIMEOUT = datetime.timedelta(seconds=60)
PROMPT = [75, 72, 79]


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` 0: no answer within the time that was given."""

    status: int
    body: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """One request."""

    method: str
    path: str
    body: dict[str, Any] | None = None


class Server:
    """One engine's HTTP server. Every request has a connection of its own, as a successor's would."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        assert where.port is not None
        self.address = (where.hostname, where.port)

    def ask(self, call: Call, seconds: float = 120.0) -> Answer:
        """Ask and wait for the answer."""
        connection = http.client.HTTPConnection(*self.address, timeout=seconds)
        started = time.perf_counter()
        try:
            body = None if call.body is None else json.dumps(call.body)
            connection.request(call.method, call.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException):
            return Answer(0, None, time.perf_counter() - started)
        finally:
            connection.close()
        try:
            parsed = json.loads(raw)
        except ValueError:
            parsed = raw.decode(errors="replace")
        return Answer(response.status, parsed, time.perf_counter() - started)

    def ask_aside(self, call: Call) -> Callable[[], Answer]:
        """Ask in a thread; calling the result waits for the answer."""
        box: list[Answer] = []
        thread = threading.Thread(target=lambda: box.append(self.ask(call)))
        thread.start()

        def answer() -> Answer:
            thread.join()
            return box[0]

        return answer

    def ask_and_die(self, call: Call, linger: float, *, reset: bool) -> None:
        """Send the whole request and break the connection without reading: what a gate does that is killed."""
        data = json.dumps(call.body).encode()
        head = f"{call.method} {call.path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
        with socket.create_connection(self.address) as s:
            s.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(linger)
            if reset:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Engine:
    """What differs between the two makes."""

    def __init__(self, kind: str, models: dict[str, str]) -> None:
        self.sglang = kind == "sglang"
        self.models = models
        sg = self.sglang
        self.pause = (
            Call("POST", "/pause_generation", {"mode": "retract"}) if sg else Call("POST", "/pause?mode=keep", {})
        )
        self.resume = Call("POST", "/continue_generation" if sg else "/resume", {})
        self.flush = Call("POST", "/flush_cache" if sg else "/reset_prefix_cache", {})
        self.proof = Call("POST", "/weights_checker" if sg else "/weight_checker", {"action": "checksum"})
        self.begin = Call("POST", "/begin_weight_update" if sg else "/start_weight_update", {})
        self.end = Call("POST", "/end_weight_update", {}) if sg else Call("POST", "/finish_weight_update", {})
        self.others = ["/model_info", "/ready", "/v1/loads", "/server_info"]
        if not sg:
            self.others = ["/version", "/health", "/is_paused", "/server_info"]

    def load(self, which: str) -> Call:
        """Load a checkpoint from disk."""
        path = self.models[which]
        if self.sglang:
            return Call("POST", "/update_weights_from_disk", {"model_path": path, "flush_cache": False})
        return Call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})

    def join(self, port: int) -> Call:
        """Join the sender's group; blocks the engine's loop until the sender is there."""
        where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        if self.sglang:
            return Call("POST", "/init_weights_update_group", {**where, "group_name": GROUP, "backend": "gloo"})
        init = {**where, "timeout_s": TIMEOUT.total_seconds()}
        return Call("POST", "/init_weight_transfer_engine", {"init_info": init})

    def receive(self, weights: dict[str, torch.Tensor]) -> Call:
        """Receive these tensors by broadcast."""
        types = [str(w.dtype).removeprefix("torch.") for w in weights.values()]
        shapes = [list(w.shape) for w in weights.values()]
        names = list(weights)
        if self.sglang:
            body = {"names": names, "dtypes": types, "shapes": shapes, "group_name": GROUP, "flush_cache": False}
            return Call("POST", "/update_weights_from_distributed", body)
        return Call(
            "POST", "/update_weights", {"update_info": {"names": names, "dtype_names": types, "shapes": shapes}}
        )

    def generate(self, tokens: int) -> Call:
        """Greedy generation."""
        if self.sglang:
            how = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            return Call("POST", "/generate", {"input_ids": PROMPT, "sampling_params": how})
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return Call("POST", "/v1/completions", body)

    def group(self, listener: socket.socket) -> Any:
        """The sender's side of the group."""
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=TIMEOUT,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=listener.detach(),  # torch itself would listen on every address
        )
        for prefix in (GROUP, f"{GROUP}/", "cpu/") if self.sglang else ():
            store = dist.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(store, 0, 2, TIMEOUT)


class Experiment:
    """The four questions."""

    def __init__(self, kind: str, url: str, models: dict[str, str], trials: int) -> None:
        self.server = Server(url)
        self.engine = Engine(kind, models)
        self.trials = trials
        self.digests: dict[str, str] = {}
        self.early = 0

    def say(self, *words: object) -> None:
        """One line of the report."""
        print(*(str(w)[:200] for w in words), flush=True)

    def digest(self, answer: Answer) -> str:
        """What the proof says of the weights; a refusal is its own value."""
        if answer.status != 200:
            return f"HTTP {answer.status}"
        body = answer.body
        return str(body["per_engine_checksum"]) if self.engine.sglang else json.dumps(body, sort_keys=True)

    def proof(self) -> str:
        """Pause and ask for the checksum, as a restarted gate does."""
        self.server.ask(self.engine.pause)
        return self.digest(self.server.ask(self.engine.proof))

    def run(self) -> int:
        """All questions; the exit code."""
        for which in "ba":
            self.server.ask(self.engine.pause)
            assert self.server.ask(self.engine.load(which)).status == 200
            self.digests[which] = self.digest(self.server.ask(self.engine.proof))
        assert self.digests["a"] != self.digests["b"], "the checkpoints hash alike: nothing could be told apart"
        self.broadcast()
        self.race()
        self.open_engine()
        return 1 if self.early else 0

    def _poll(self, title: str) -> None:
        for path in self.engine.others:
            answer = self.server.ask(Call("GET", path), 3)
            self.say(f"  {title}: GET {path}", answer.status or "no answer in 3 s")
        for name, call in (("pause", self.engine.pause), ("proof", self.engine.proof)):
            self.say(f"  {title}: {name}", self.server.ask(call, 3).status or "no answer in 3 s")

    def broadcast(self) -> None:
        """Questions 1 and 2: a rendezvous that waits for its sender, a broadcast that waits for its bytes."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        self.say("1. the gate died while the engine waits for a sender")
        self.server.ask_and_die(self.engine.join(listener.getsockname()[1]), 0.5, reset=False)
        self._poll("no sender")
        waiting = self.server.ask_aside(self.engine.proof)
        group = self.engine.group(listener)
        late = waiting()
        self.say(
            "  the sender came late; proof", late.status, "weights as before:", self.digest(late) == self.digests["a"]
        )
        self.say("2. the gate died while the engine waits for bytes")
        weights = load_file(str(Path(self.engine.models["b"]) / "model.safetensors"))
        assert self.server.ask(self.engine.begin).status == 200
        self.server.ask_and_die(self.engine.receive(weights), 0.5, reset=False)
        self._poll("no bytes")
        waiting = self.server.ask_aside(self.engine.proof)
        for tensor in weights.values():
            group.broadcast([tensor.contiguous()]).wait()
        after = waiting()
        done = self.digest(after) == self.digests["b"]
        self.say("  bytes came; the waiting proof", after.status, "shows the new weights:", done)
        self.server.ask(self.engine.end)
        ended = self.proof()
        self.say("  after the session's end the proof shows the new weights:", ended == self.digests["b"])
        if after.status == 200 and not done:
            self.early += 1

    def race(self) -> None:
        """Question 3: the gate dies right after sending a load; the proof is asked at once on another connection."""
        now, never, seconds = "b", 0, []
        for trial in range(self.trials):
            to = "a" if now == "b" else "b"
            linger = random.choice([0.0, 0.0, 0.0005, 0.002, 0.005])
            self.server.ask_and_die(self.engine.load(to), linger, reset=bool(trial % 2))
            started = time.perf_counter()
            first = self.proof()
            seconds.append(time.perf_counter() - started)
            time.sleep(0.15)
            second = self.proof()
            self.early += first != second
            never += second == self.digests[now]
            now = now if second == self.digests[now] else to
        seconds.sort()
        self.say(
            f"3. {self.trials} gates died after sending a load to a paused engine: {self.early} proofs came before its "
            f"effect, {never} loads never began, proof took {seconds[len(seconds) // 2] * 1000:.0f} ms (median), "
            f"{seconds[-1] * 1000:.0f} ms (most)"
        )

    def open_engine(self) -> None:
        """Question 4: the same with an engine that was never paused. No gate does this; the answer says why."""
        before = self.proof()
        to = "a" if before == self.digests["b"] else "b"
        self.server.ask(self.engine.resume)
        busy = self.server.ask_aside(self.engine.generate(600))
        time.sleep(0.4)
        self.server.ask_and_die(self.engine.load(to), 0.05, reset=False)
        at_proof = self.proof()
        self.server.ask(self.engine.resume)
        busy()
        time.sleep(0.5)
        after = self.proof()
        self.say("4. a load sent to an open, busy engine; then pause, proof, resume")
        self.say(
            "  in effect at the proof:", at_proof != before, " first in effect AFTER the resume:", after != at_proof
        )


if __name__ == "__main__":
    kind_, url_, a, b, *more = sys.argv[1:]
    sys.exit(Experiment(kind_, url_, {"a": a, "b": b}, int(more[0]) if more else 300).run())
