"""Megatron-LM's parser of the command line, for training scripts that are run unchanged."""

from patches.manager import Patch

PATCH = Patch(
    name="megatron_arguments",
    target="megatron.training.arguments:parse_args",
    places=("megatron.training.arguments:parse_args", "megatron.training.initialize:parse_args"),
    distribution="megatron-core",
    versions=">=0.16.1,<0.17",
    signature="(extra_args_provider, ignore_unknown_args)",
    replacement="ext.adapters.megatron.host_arguments:parse_args",
    reason="a script that is not edited passes no extra_args_provider of ours.",
)
