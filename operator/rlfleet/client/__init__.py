"""The trainer's SDK.

client = Client("default", "demo")
with WeightSender(pod_ip, pod_uid=pod_uid, public_keys=client.public_keys) as sender:
    manifest = sender.publish(step, model.state_dict())
    client.sync(step, sender_incarnation=sender.incarnation, manifest_digest=manifest.digest)
"""

from rlfleet.client.client import Client
from rlfleet.client.errors import (
    ApiUnavailable,
    ClientError,
    ConfigError,
    DemandNotFound,
    DemandRefused,
    Forbidden,
    GrantTimeout,
    HoldingNeedsAction,
    NamespaceNotFound,
    NotFound,
    NotInstalled,
    PipelineNotFound,
    RoundNotFound,
    RoutingDegraded,
    SenderNotReady,
    SyncError,
    SyncFailed,
    SyncRefused,
    SyncTimeout,
    Unauthenticated,
    WaitTimeout,
)
from rlfleet.client.rounds import SyncResult

__all__ = [
    "ApiUnavailable",
    "Client",
    "ClientError",
    "ConfigError",
    "DemandNotFound",
    "DemandRefused",
    "Forbidden",
    "GrantTimeout",
    "HoldingNeedsAction",
    "NamespaceNotFound",
    "NotFound",
    "NotInstalled",
    "PipelineNotFound",
    "RoundNotFound",
    "RoutingDegraded",
    "SenderNotReady",
    "SyncError",
    "SyncFailed",
    "SyncRefused",
    "SyncResult",
    "SyncTimeout",
    "Unauthenticated",
    "WaitTimeout",
]
