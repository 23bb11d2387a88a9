"""``deepspeed.initialize`` itself, for training scripts that are run unchanged."""

from patches.manager import Patch

PATCH = Patch(
    name="deepspeed_initialize",
    target="deepspeed:initialize",
    places=("deepspeed:initialize",),
    distribution="deepspeed",
    versions=">=0.19.8,<0.20",
    signature=(
        "(args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port, mpu, "
        "dist_init_required, collate_fn, config, mesh_param, config_params)"
    ),
    replacement="ext.adapters.deepspeed.initialize:initialize",
    reason="a script that is not edited calls it by this name.",
)
