"""Configuration: section dataclasses, flags, YAML, environment, and the rules between values. Free of torch.

:mod:`~mindspeed_llm.config.run` holds :class:`RunConfig`, :mod:`~mindspeed_llm.config.resolve` makes one.
"""
