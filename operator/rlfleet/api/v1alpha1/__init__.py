"""The resources of rlfleet.dev/v1alpha1 as models; the CRDs and their reference pages are generated from these."""

from rlfleet.api.v1alpha1.common import InvalidObject, ObjectMeta
from rlfleet.api.v1alpha1.enginepool import EnginePool, EnginePoolSpec
from rlfleet.api.v1alpha1.enginepool_status import EnginePoolStatus, EngineState
from rlfleet.api.v1alpha1.rlpipeline import RLPipeline, RLPipelineSpec
from rlfleet.api.v1alpha1.rlpipeline_status import RLPipelineStatus
from rlfleet.api.v1alpha1.syncround import SyncRound, SyncRoundSpec
from rlfleet.api.v1alpha1.syncround_status import RoundPhase, SyncRoundStatus
from rlfleet.api.v1alpha1.trainerdemand import TrainerDemand, TrainerDemandSpec

__all__ = [
    "EnginePool",
    "EnginePoolSpec",
    "EnginePoolStatus",
    "EngineState",
    "InvalidObject",
    "ObjectMeta",
    "RLPipeline",
    "RLPipelineSpec",
    "RLPipelineStatus",
    "RoundPhase",
    "SyncRound",
    "SyncRoundSpec",
    "SyncRoundStatus",
    "TrainerDemand",
    "TrainerDemandSpec",
]
