"""Drafts the family of a Hugging Face folder from those there are, and proves it; ``docs/add-a-model.md``."""
