"""Optimizers that megatron-core's wrappers drive."""
