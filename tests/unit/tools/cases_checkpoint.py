"""What the ranks run to make saves for the tests of the checkpoint tool."""

from __future__ import annotations

from pathlib import Path

import torch

from mindspeed_llm.training.initialize import initialize
from mindspeed_llm.training.save_load import load_checkpoint
from mindspeed_llm.training.setup import setup
from tests.distributed.cases_core import configuration, recipe, save


def save_again(folder: str, layout: str, tokens: torch.Tensor, load: str, step: int, root: str) -> None:
    """Load a save and save it, untouched, in another layout."""
    cfg = configuration(folder, recipe(layout, tokens))
    initialize(cfg)
    run = setup(cfg)
    load_checkpoint(run, Path(load), step)
    save(run, root, True)
