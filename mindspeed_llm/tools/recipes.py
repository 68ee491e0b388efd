"""Writes the recipes in ``examples/`` from one table.

Names: ``examples/<model>/pretrain_<model>_<size>[_32k].sh`` and ``data_<model>_pretrain.sh``. They are MindSpeed-LLM's
without what a variable says here: ``pretrain_qwen25_7b_8k_pack_ptd_A3.sh`` is ``pretrain_qwen25_7b.sh`` with
``SEQ_LENGTH=8192`` and ``NODE_TYPE=Snt9b23``, ``data_convert_qwen25_pretrain.sh`` is ``data_qwen25_pretrain.sh``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A pretraining run of one model.

    Attributes:
        model: folder, and part of the name.
        size: as MindSpeed-LLM spells it.
        config: the published model whose architecture it takes, by its name for ``--hf-config``.
        seq_length: tokens of a sample.
        cards: processes on nodes of Snt9b and of Snt9b23.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
        micro_batch: samples of a pass.
        global_batch: samples of a step.
        layers_per_stage: layers of an interleaved stage; None without interleaving.
        suffix: end of the name.
    """

    model: str
    size: str
    config: str
    seq_length: int
    cards: tuple[int, int]
    tp: int
    pp: int
    micro_batch: int
    global_batch: int
    layers_per_stage: int | None = None
    suffix: str = ""

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return f"pretrain_{self.model}_{self.size}{self.suffix}"


def _long(size: str, config: str, cards: int, tp: int, pp: int, batch: int, per_stage: int | None = None) -> Recipe:
    return Recipe("qwen25", size, config, 32768, (cards, cards), tp, pp, 1, batch, per_stage, "_32k")


RECIPES: tuple[Recipe, ...] = (
    Recipe("qwen2", "0point5b", "Qwen2-0.5B", 4096, (1, 2), 1, 1, 2, 128),
    Recipe("qwen2", "1point5b", "Qwen2-1.5B", 4096, (1, 2), 1, 1, 2, 64),
    Recipe("qwen2", "7b", "Qwen2-7B", 4096, (4, 4), 4, 1, 1, 256),
    Recipe("qwen2", "72b", "Qwen2-72B", 4096, (32, 32), 8, 4, 1, 64, 5),
    Recipe("qwen25", "0point5b", "Qwen2.5-0.5B", 4096, (1, 2), 1, 1, 2, 128),
    Recipe("qwen25", "1point5b", "Qwen2.5-1.5B", 4096, (1, 2), 1, 1, 2, 64),
    Recipe("qwen25", "7b", "Qwen2.5-7B", 4096, (4, 4), 4, 1, 1, 64),
    Recipe("qwen25", "14b", "Qwen2.5-14B", 4096, (8, 8), 8, 1, 1, 64),
    Recipe("qwen25", "32b", "Qwen2.5-32B", 4096, (16, 16), 8, 2, 1, 64),
    Recipe("qwen25", "72b", "Qwen2.5-72B", 4096, (32, 32), 8, 4, 1, 128, 5),
    _long("0point5b", "Qwen2.5-0.5B", 8, 2, 1, 32),
    _long("1point5b", "Qwen2.5-1.5B", 8, 2, 1, 32),
    _long("7b", "Qwen2.5-7B", 8, 4, 2, 64),
    _long("14b", "Qwen2.5-14B", 16, 8, 2, 64),
    _long("32b", "Qwen2.5-32B", 32, 8, 4, 64),
    _long("72b", "Qwen2.5-72B", 64, 8, 4, 64, 5),
    Recipe("llama2", "7b", "Llama-2-7B", 4096, (8, 8), 1, 2, 1, 256),
    Recipe("llama2", "13b", "Llama-2-13B", 4096, (8, 8), 8, 1, 4, 512),
    Recipe("llama2", "70b", "Llama-2-70B", 4096, (32, 32), 8, 4, 1, 1024, 5),
    Recipe("llama3", "8b", "Llama-3-8B", 8192, (8, 8), 8, 1, 2, 64),
    Recipe("llama3", "70b", "Llama-3-70B", 8192, (64, 64), 8, 8, 1, 512),
    Recipe("llama31", "8b", "Llama-3.1-8B", 8192, (4, 4), 4, 1, 1, 64),
    Recipe("llama31", "70b", "Llama-3.1-70B", 8192, (64, 64), 8, 8, 1, 512),
    Recipe("llama32", "1b", "Llama-3.2-1B", 8192, (1, 2), 1, 1, 1, 64),
    Recipe("llama32", "3b", "Llama-3.2-3B", 8192, (2, 2), 2, 1, 1, 64),
    Recipe("llama33", "70b", "Llama-3.3-70B", 8192, (64, 64), 8, 8, 1, 64),
)
"""Cards are the fewest that the published tables name for full training with MindSpeed-LLM at this length. They name
none for Llama 2, 3 and 3.3, nor for Qwen2.5 of 0.5B, 1.5B and 14B at 32k: these are MindSpeed-LLM's own recipes, and
Llama 3.1's of the same size."""
