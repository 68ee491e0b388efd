"""``pretrain_gpt.py``: a command line to a pretraining run."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_llm.cli.flags import parse_pretrain
from mindspeed_llm.config.resolve import Layer
from mindspeed_llm.errors import ConfigError, SuiteError

CONFIG = "config.json"


def family_layer(given: Mapping[str, Any]) -> Layer | None:
    """What the Hugging Face configuration of ``--load`` or ``--hf-config`` says about the architecture."""
    # Families are cheap to import, but needed only here.
    import json

    from mindspeed_llm.models.registry import family_by_name, family_for

    for flag, binding in (("load", True), ("hf_config", False)):
        if given.get(flag) is None:
            continue
        path = Path(str(given[flag]))
        path = path / CONFIG if path.is_dir() else path
        if path.suffix != ".json" or not path.exists():
            if flag == "hf_config":
                raise ConfigError(f"--hf-config: there is no {path}", fix="give a folder with config.json, or the file")
            continue
        try:
            hf_config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON", got=str(error)) from error
        named = given.get("model_type_hf")
        family = family_by_name(str(named)) if named else family_for(hf_config)
        values = {**family.config_to_values(hf_config), "model_type_hf": family.name}
        return Layer(f"{family.name} ({path})", values, binding=binding)
    return None


def _set_up_logging(level: int | None) -> None:
    """The suite's own words on rank 0, warnings on the others; megatron-core's chatter only when it is asked for."""
    rank = int(os.environ.get("RANK", "0"))
    chosen = level or (logging.INFO if rank == 0 else logging.WARNING)
    logging.basicConfig(level=chosen, format=f"[rank {rank}] %(message)s")
    if level is None:
        logging.getLogger("megatron").setLevel(logging.WARNING)
        for module in ("megatron", "torch"):
            warnings.filterwarnings("ignore", module=rf"{module}\b.*")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for a mistake in the configuration, 1 for other known faults."""
    try:
        cfg = parse_pretrain(sys.argv[1:] if argv is None else argv, environ=os.environ, family_values=family_layer)
        _set_up_logging(cfg.logging.logging_level)
        from mindspeed_llm.training.pretrain import pretrain

        pretrain(cfg)
    except SuiteError as error:
        sys.stderr.write(f"pretrain_gpt.py: error: {error}\n")
        return error.exit_code
    return 0
