"""The operator's client for gates and senders, and what its callers need to name.

Invariant: what changes a gate or sender is sent only by a leader (kube.guard); reading is free.
"""

from __future__ import annotations

from rlfleet.control.gate_calls import GateCalls
from rlfleet.control.peering import Caller, Peer, PeerError, Refused, Silent, fan_out
from rlfleet.control.sender_calls import SenderCalls


class Peers(GateCalls, SenderCalls):
    """Calls to gates and senders through one session. Close it when done."""


__all__ = ["Caller", "Peer", "PeerError", "Peers", "Refused", "Silent", "fan_out"]
