"""Tensor-parallel functions that megatron-core lacks or does differently."""
