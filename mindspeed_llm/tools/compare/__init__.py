"""The first module, forward or backward, at which two ways of running a model differ; ``docs/numerics.md``."""
