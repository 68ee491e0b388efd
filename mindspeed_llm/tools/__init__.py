"""Programs for developers and operators, run as ``python -m mindspeed_llm.tools.<name>``."""
