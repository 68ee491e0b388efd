"""``python -m mindspeed_llm.tools.migrate``: recipes of Megatron-LM and MindSpeed-LLM, read, judged and rewritten."""
