"""The quickstart's recipe: every flag that it passes is one of ours, and its variables reach the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.cli.flags import parse_pretrain
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.registry import family_layer

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "quickstart" / "pretrain_quickstart.sh"


def command_of(folder: Path, *more: str, **environment: str) -> list[str]:
    """What the recipe starts, as its shell expands it: the Python that it is given writes its arguments down."""
    recorder = folder / "python"
    recorder.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f'json.dump([os.getcwd(), sys.argv[1:]], open("{folder}/call", "w"))\n'
    )
    recorder.chmod(0o755)
    # From elsewhere: a recipe finds its project by itself.
    variables = {"PATH": os.environ["PATH"], "PYTHON": str(recorder), **environment}
    done = subprocess.run(
        ["bash", RECIPE, *more], cwd=folder, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    where, argv = json.loads((folder / "call").read_text())
    assert where == str(ROOT)
    return argv


def configuration(argv: list[str]) -> RunConfig:
    """The arguments behind the script's name, read as ``pretrain_gpt.py`` does under the launcher's processes."""
    at = argv.index("pretrain_gpt.py")
    world = argv[argv.index("--nproc_per_node") + 1]
    return parse_pretrain(argv[at + 1 :], environ={"WORLD_SIZE": world}, family_values=family_layer)


def test_every_flag_is_known_and_the_values_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cfg = configuration(command_of(tmp_path))
    assert cfg.model.hf_config is not None
    shape = json.loads(Path(cfg.model.hf_config, "config.json").read_text())
    t = cfg.transformer
    assert (t.num_layers, t.hidden_size, t.ffn_hidden_size, t.num_attention_heads, t.num_query_groups) == (
        shape["num_hidden_layers"],
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["num_attention_heads"],
        shape["num_key_value_heads"],
    )
    assert cfg.model.vocab_size == shape["vocab_size"]
    assert t.layernorm_epsilon == shape["rms_norm_eps"]
    assert cfg.model.rotary_base == (shape.get("rope_parameters") or shape)["rope_theta"]
    assert cfg.model.untie_embeddings_and_output_weights is not shape["tie_word_embeddings"]


def test_variables_and_further_flags_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    more = ("--seed", "7", "--global-batch-size", "64")
    argv = command_of(tmp_path, *more, TRAIN_ITERS="48", CKPT_DIR="some where", NPROC_PER_NODE="4")
    cfg = configuration(argv)
    assert (cfg.training.seed, cfg.training.global_batch_size) == (7, 64)
    assert (cfg.training.train_iters, cfg.checkpoint.save) == (48, "some where")
    assert cfg.distributed.world_size == 4
    with pytest.raises(ConfigError, match="--reset-attention-mask"):
        configuration([*argv, "--reset-atention-mask"])
