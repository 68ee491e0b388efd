"""Model families: one declarative, torch-free file each; ``registry`` finds the one for a Hugging Face config."""
