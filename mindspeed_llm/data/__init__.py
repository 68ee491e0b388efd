"""From text to batches: tokenizers, preparation, indexed files, datasets, samplers, batches.

``tokenizer``, ``rows``, ``indexed``, ``manifest`` and ``prepare`` need neither torch nor megatron-core, because
preparation runs on machines and in processes where their start-up would be most of the time.
"""
