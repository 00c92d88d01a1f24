"""Times as the Kubernetes API writes them."""

from __future__ import annotations

import datetime


def now() -> str:
    """The current time to the second (metav1.Time)."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro() -> str:
    """The current time to the microsecond (metav1.MicroTime), for Leases."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
