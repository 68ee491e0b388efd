"""Weights in and out: names, invertible transforms, layouts, and the Hugging Face and megatron-core formats."""
