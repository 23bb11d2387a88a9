"""The engine class that ``deepspeed.initialize`` makes for a PipelineModule."""

from patches.manager import Patch

PATCH = Patch(
    name="deepspeed_pipeline_engine",
    target="deepspeed.runtime.pipe.engine:PipelineEngine",
    places=("deepspeed:PipelineEngine",),
    distribution="deepspeed",
    versions=">=0.19.8,<0.20",
    signature="(has_bool_tensors, super_args, super_kwargs)",
    replacement="ext.adapters.deepspeed.engine:PlanPipelineEngine",
    reason="deepspeed.initialize picks the class by name and takes no other.",
)
