"""The weight sender: a library in the trainer that keeps complete weights and moves them to engines.

    with WeightSender(pod_ip, pod_uid=pod_uid, public_keys=client.public_keys) as sender:
        sender.publish(-1, model.state_dict())
        ...
        sender.publish(step, model.state_dict())

Needs torch where tensors come in; importing this package does not.
"""

from rlfleet.sender.errors import (
    CheckpointExists,
    GatherFailed,
    GatherTimeout,
    InvalidStateDict,
    LayoutChanged,
    PublishTimeout,
    SenderClosed,
    SenderError,
    VersionGoesBackwards,
)
from rlfleet.sender.sender import OUTSIDE_CLUSTER, WeightSender
from rlfleet.sender.sharded import publish_sharded

__all__ = [
    "OUTSIDE_CLUSTER",
    "CheckpointExists",
    "GatherFailed",
    "GatherTimeout",
    "InvalidStateDict",
    "LayoutChanged",
    "PublishTimeout",
    "SenderClosed",
    "SenderError",
    "VersionGoesBackwards",
    "WeightSender",
    "publish_sharded",
]
