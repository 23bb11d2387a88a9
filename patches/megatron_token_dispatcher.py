"""The dispatcher that megatron-core's MoE layer picks from an if-chain."""

from patches.manager import Patch

PATCH = Patch(
    name="megatron_token_dispatcher",
    target="megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
    places=("megatron.core.transformer.moe.moe_layer:MoEAlltoAllTokenDispatcher",),
    distribution="megatron-core",
    versions=">=0.16.1,<0.17",
    signature="(num_local_experts, local_expert_indices, config, pg_collection)",
    replacement="ext.adapters.megatron.moe:ExchangeTokenDispatcher",
    reason="MoELayer chooses the class by the flag --moe-token-dispatcher-type and takes no other.",
)
