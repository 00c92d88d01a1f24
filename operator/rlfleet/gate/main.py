"""Entry of the gate: ``rlfleet gate`` and ``python -m rlfleet.gate``. All configuration comes from the environment.

Invariant: SIGTERM ends the gate without touching the engine or a router. Whether an engine may serve is the
operator's decision, and a gate that is only being restarted must find everything as it left it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from rlfleet import logs
from rlfleet.gate.app import Gate
from rlfleet.gate.config import ConfigError, GateConfig, load_config
from rlfleet.gate.server import GateServer
from rlfleet.gate.store import StoreError
from rlfleet.serving import listen
from rlfleet.tls import ServerTLS, TLSError

log = logging.getLogger(__name__)

#: Seconds for open calls (long polls, receives) to end when the gate stops.
SHUTDOWN_SECONDS = 2.0
READ_BUFFER = 2**20


async def serve(config: GateConfig, tls: ServerTLS | None = None) -> int:
    """Serve until SIGTERM or SIGINT; 0 then, 1 when the durable state failed."""
    stop = asyncio.Event()
    failures: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        log.critical("the gate can not go on: %s: %s", type(error).__name__, error)
        failures.append(error)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gate = Gate(config, on_fatal)
    await gate.start()
    listener = None
    try:
        listener = await listen(
            GateServer(gate, on_fatal).application(),
            at=(config.pod_ip, config.port),
            shutdown_seconds=SHUTDOWN_SECONDS,
            read_buffer=READ_BUFFER,
            tls=tls,
        )
        log.info("gate listens", extra={"address": f"{config.pod_ip}:{config.port}"})
        await stop.wait()
    finally:
        if listener is not None:
            await listener.close()
        await gate.stop()
    return 1 if failures else 0


def run(env: Mapping[str, str]) -> int:
    """Run a gate configured by ``env``; returns the exit code."""
    level = env.get("RLFLEET_LOG_LEVEL", "INFO").upper()
    try:
        config = load_config(env)
        if level not in logs.LEVELS:
            raise ConfigError(f"RLFLEET_LOG_LEVEL is {level!r}: use {', '.join(logs.LEVELS)}")
        tls = ServerTLS(config.tls_dir) if config.tls_dir is not None else None
    except TLSError as e:
        print(f"rlfleet gate: RLFLEET_TLS_DIR: {e}", file=sys.stderr)
        return 2
    except ConfigError as e:
        print(f"rlfleet gate: {e}", file=sys.stderr)
        return 2
    logs.configure(
        "json",
        level,
        {"pod": config.pod_name, "engine": config.engine_name, "podUID": config.pod_uid},
    )
    try:
        return asyncio.run(serve(config, tls))
    except StoreError as e:
        log.critical("%s", e)
        return 1
    except OSError as e:
        log.critical("can not listen on %s:%d: %s", config.pod_ip, config.port, e)
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments (there are none but --help) and run."""
    parser = argparse.ArgumentParser(
        prog="rlfleet gate", description="The sidecar that drives one engine. Configured by RLFLEET_* variables only."
    )
    parser.parse_args(argv)
    return run(os.environ)
