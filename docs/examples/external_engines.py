"""The engines that are open now, as the arguments that slime and miles take for engines which they did not start.

    python external_engines.py http://rlfleet-discovery.rlfleet-system:8001/namespaces/NS/pipelines/demo
    --rollout-external-engine-addrs 10.1.0.7:30000 10.1.0.8:30000

With ``--urls`` one URL a line, and with ``--follow`` a fresh list whenever it changes, for whatever keeps its own list.
Only engines that rlfleet has proven and opened are named; while nothing is known it says so and prints no list, because
an empty list would mean that there is no engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from urllib.parse import urlsplit

import httpx


def open_engines(discovery: str) -> list[str]:
    """URLs of engines that serve proven weights, in a fixed order. Raises httpx.HTTPError when nothing is known."""
    answer = httpx.get(f"{discovery.rstrip('/')}/v1/rl/workers", timeout=30)
    answer.raise_for_status()
    ours = [worker["rlfleet"] for worker in answer.json()["workers"] if "error" not in worker]
    return sorted(facts["engine_url"] for facts in ours if facts.get("open") is True)


def text(urls: list[str], *, as_urls: bool) -> str:
    """What is printed for these engines."""
    if as_urls:
        return "\n".join(urls)
    return " ".join(["--rollout-external-engine-addrs", *(urlsplit(url).netloc for url in urls)])


def main(argv: list[str] | None = None) -> int:
    """Print the list; with --follow until interrupted. Exit code 1 when nothing is known, or nobody is open."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("discovery", help="base URL of worker discovery (chart value discovery.enabled)")
    parser.add_argument("--urls", action="store_true", help="one URL a line")
    parser.add_argument("--follow", type=float, metavar="SECONDS", help="look again so often, print what changed")
    arguments = parser.parse_args(argv)
    shown: list[str] | None = None
    while True:
        try:
            found = open_engines(arguments.discovery)
        except httpx.HTTPError as e:
            print(f"nothing is known of the engines: {e}", file=sys.stderr)
            if arguments.follow is None:
                return 1
        else:
            if not found and arguments.follow is None and not arguments.urls:
                print("no engine is open: none was proven to hold the committed version yet", file=sys.stderr)
                return 1
            if found != shown:
                print(text(found, as_urls=arguments.urls), flush=True)
            shown = found
        if arguments.follow is None:
            return 0
        time.sleep(arguments.follow)


if __name__ == "__main__":
    sys.exit(main())
