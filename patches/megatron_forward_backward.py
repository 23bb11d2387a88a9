"""The schedule that megatron-core picks by pipeline and virtual pipeline size."""

from patches.manager import Patch

PATCH = Patch(
    name="megatron_forward_backward",
    target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    places=(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        "megatron.core.pipeline_parallel:get_forward_backward_func",
    ),
    importers=(
        "megatron.training.training:get_forward_backward_func",
        "megatron.rl.rl_utils:get_forward_backward_func",
        "megatron.post_training.generate:get_forward_backward_func",
    ),
    distribution="megatron-core",
    versions=">=0.16.1,<0.17",
    signature="(pp_size, vp_size)",
    replacement="ext.adapters.megatron.host:get_forward_backward_func",
    reason="training code calls it by this name and takes no other schedule.",
)
