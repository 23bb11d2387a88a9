"""The Megatron-core host: a forward-backward function that runs plans, its flags, and its launcher."""
