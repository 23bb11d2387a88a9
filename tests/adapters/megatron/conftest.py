"""megatron-core takes seconds to import: the fork server of run_ranks does it once."""

from ext.testing.ranks import preload

preload("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt", "megatron.core.distributed")
