"""Conversion of whole checkpoints on disk: Hugging Face folders, ``torch_dist`` folders and per-rank trees."""
