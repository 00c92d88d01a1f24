"""A process whose main loop serves probes and then blocks, as a defect in a reconciler would make it."""

import asyncio
import sys

from rlfleet.app.health import HealthServer, LoopStamp


async def main() -> None:
    stamp = LoopStamp(interval=0.05)
    server = HealthServer(
        "127.0.0.1", 0, stamp=stamp, stall_seconds=1.0, not_ready=lambda: "", metrics=lambda: b"x 1\n"
    )
    server.start()
    stamping = asyncio.create_task(stamp.run())
    print(server.port, flush=True)
    sys.stdin.readline()  # blocks the loop until told to go on: that is the test
    await asyncio.sleep(0.2)
    print("free", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    stamping.cancel()
    server.stop()


if __name__ == "__main__":
    asyncio.run(main())
