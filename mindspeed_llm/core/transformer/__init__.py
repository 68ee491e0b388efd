"""Layers, their configuration and the specs that assemble them."""
