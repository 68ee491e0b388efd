"""MindSpeed-LLM: a training suite for large language models on megatron-core.

Importing this package brings in nothing but its version; ask for what you need by module, which
``docs/architecture.md`` lists.
"""

__version__ = "0.1.0"
