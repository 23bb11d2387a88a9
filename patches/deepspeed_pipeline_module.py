"""The PipelineModule that training scripts build, for scripts that are run unchanged."""

from patches.manager import Patch

PATCH = Patch(
    name="deepspeed_pipeline_module",
    target="deepspeed.runtime.pipe.module:PipelineModule",
    places=(
        "deepspeed.runtime.pipe.module:PipelineModule",
        "deepspeed.runtime.pipe:PipelineModule",
        "deepspeed.pipe:PipelineModule",
        "deepspeed:PipelineModule",
    ),
    distribution="deepspeed",
    versions=">=0.19.8,<0.20",
    signature=(
        "(layers, num_stages, topology, loss_fn, seed_layers, seed_fn, base_seed, partition_method, "
        "activation_checkpoint_interval, activation_checkpoint_func, checkpointable_layers, dynamic_shape)"
    ),
    replacement="ext.adapters.deepspeed.placement:ScriptPipelineModule",
    reason="layers are placed while the module is built, and a script that is not edited builds it by this name.",
)
