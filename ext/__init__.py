"""Pipeline schedules, recomputation and MoE dispatch for DeepSpeed and Megatron-core."""

__version__ = "0.1.0"
