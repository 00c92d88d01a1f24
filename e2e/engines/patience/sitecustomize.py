"""Python of real vLLM engines reads this at its start: a process that waits for another one sleeps instead of yielding.

vLLM's processes wait for each other in loops of ``sched_yield``. Linux 6.18 answers two of them on two cores by
starving everybody else: threads of the apiserver and of the kernel itself did not run for 7 s, a kubectl not for 32 s.
Nothing else of the engine is touched.
"""

import os
import time

#: Seconds. A hand-over between vLLM's processes costs about as much anyway.
PAUSE = 0.0001


def _sleep() -> None:
    time.sleep(PAUSE)


os.sched_yield = _sleep
