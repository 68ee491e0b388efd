"""Writes the tiny model of a family, with random weights and the quickstart's tokenizer: FAMILY FOLDER."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import transformers

from mindspeed_llm.models.registry import family_by_name

MODEL = Path(__file__).parents[1] / "quickstart" / "model"


def main(name: str, folder: str) -> None:
    """Write it as transformers does."""
    family = family_by_name(name)
    kind = getattr(transformers, family.hf_architectures[0])
    words = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    ids = {key: words.get(key) for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    kind(kind.config_class(**{**family.tiny, **ids})).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
