"""The public surface of rlix's MILES coordinator over this SDK: a trainer script that uses it trains unchanged.

    coordinator = MilesCoordinator(pipeline_id="job_1", pipeline_config=config)

Names, keywords, return values and errors are the coordinator's; docs/reference/compat.md lists them with what happens
underneath. What it kept in its own process (the active set, the version that is ready, grants) stands in the cluster
here, and survives the process.
"""

from rlfleet.client.compat.coordinator import MilesCoordinator, PipelineActor, ProgressReport, ResizeResponse

__all__ = ["MilesCoordinator", "PipelineActor", "ProgressReport", "ResizeResponse"]
