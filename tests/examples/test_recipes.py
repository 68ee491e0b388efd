"""The recipes of ``examples/``: written from the table, valid for the cards they name, and right about their model.

Each is started as a user does, with stand-ins for ``torchrun`` and ``python`` that write down its command line, which
then goes through the parser and the rules of ``pretrain_gpt.py`` in this process.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam
from mindspeed_llm.checkpoint.convert.record import described_model
from mindspeed_llm.checkpoint.convert.streams import Target
from mindspeed_llm.checkpoint.convert.target import check_target
from mindspeed_llm.cli import convert, preprocess
from mindspeed_llm.cli.flags import parse_pretrain
from mindspeed_llm.config.no_effect import NO_EFFECT
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.models.registry import family_layer
from mindspeed_llm.tools import recipes
from mindspeed_llm.tools.recipes import CONVERTED, RECIPES, Recipe
from tests.examples.recorded import MODEL, ROOT, TEXT, Call, project_of, record
from tests.unit.models.published import hf_config, shallow

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
MODELS = sorted({recipe.model for recipe in RECIPES})
GIVEN = {"DATA_PATH": str(TEXT), "TOKENIZER_PATH": str(MODEL), "CKPT_SAVE_DIR": "some where"}

# The fewest cards for full training with MindSpeed-LLM, as published for nodes of Snt9b and of Snt9b23, by model and
# sequence length. What is not here is not in the published tables.
PUBLISHED_CARDS = {
    ("Qwen2-0.5B", 4096): (1, 2),
    ("Qwen2-1.5B", 4096): (1, 2),
    ("Qwen2-7B", 4096): (4, 4),
    ("Qwen2-72B", 4096): (32, 32),
    ("Qwen2.5-0.5B", 4096): (1, 2),
    ("Qwen2.5-1.5B", 4096): (1, 2),
    ("Qwen2.5-7B", 4096): (4, 4),
    ("Qwen2.5-14B", 4096): (8, 8),
    ("Qwen2.5-32B", 4096): (16, 16),
    ("Qwen2.5-72B", 4096): (32, 32),
    ("Qwen2.5-7B", 32768): (8, 8),
    ("Qwen2.5-32B", 32768): (32, 32),
    ("Qwen2.5-72B", 32768): (64, 64),
    ("Qwen3-0.6B", 4096): (8, 8),
    ("Qwen3-1.7B", 4096): (8, 8),
    ("Qwen3-4B", 4096): (8, 8),
    ("Qwen3-8B", 4096): (8, 8),
    ("Qwen3-14B", 4096): (8, 8),
    ("Qwen3-32B", 4096): (16, 16),
    ("GLM-4-9B", 8192): (8, 8),
    ("Llama-3.1-8B", 8192): (4, 4),
    ("Llama-3.1-70B", 8192): (64, 64),
    ("Llama-3.2-1B", 8192): (1, 2),
    ("Llama-3.2-3B", 8192): (2, 2),
}
NODE_TYPES = {"Snt9b": 8, "Snt9b23": 16}


def path_of(recipe: Recipe) -> str:
    return f"{recipe.model}/{recipe.name}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project_of(tmp_path_factory.mktemp("recipes"))


def configuration(call: Call) -> RunConfig:
    """What ``pretrain_gpt.py`` makes of the command line, for as many processes as the recipe starts."""
    if call.program == "torchrun":
        words = dict(zip(call.words, call.words[1:], strict=False))
        world = str(int(words["--nproc_per_node"]) * int(words["--nnodes"]))
    else:
        world = call.world
    return parse_pretrain(call.flags, environ={"WORLD_SIZE": world}, family_values=family_layer)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_bash_reads_it(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert b"\r" not in path.read_bytes()
    assert os.access(path, os.X_OK) is (path.parent.name != "_shared")


def test_the_sizes_that_were_promised_are_there() -> None:
    """The sizes of MindSpeed-LLM's model tables; 32k where they say that it was verified."""
    sizes = {model: {r.size + r.suffix for r in RECIPES if r.model == model} for model in MODELS}
    qwen25 = {"0point5b", "1point5b", "7b", "14b", "32b", "72b"}
    assert sizes == {
        "qwen2": {"0point5b", "1point5b", "7b", "72b"},
        "qwen25": qwen25 | {f"{size}_32k" for size in qwen25},
        "qwen3": {"0point6b", "1point7b", "4b", "8b", "14b", "32b"}
        | {"0point6b_32k", "1point7b_32k", "4b_32k", "14b_32k", "32b_32k"},
        "glm4": {"9b", "9b_32k", "32b"},
        "llama2": {"7b", "13b", "70b"},
        "llama3": {"8b", "70b"},
        "llama31": {"8b", "70b"},
        "llama32": {"1b", "3b"},
        "llama33": {"70b"},
    }
    for model, short in (("qwen25", 4096), ("qwen3", 4096), ("glm4", 8192)):
        assert {(r.suffix, r.seq_length) for r in RECIPES if r.model == model} == {("", short), ("_32k", 32768)}


def test_they_are_what_the_table_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes.main(["--check"]) == 0
    changed, stray = (tmp_path / "qwen2" / f"pretrain_{name}.sh" for name in ("qwen2_7b", "old"))
    assert recipes.main([], folder=tmp_path) == 0
    assert recipes.main(["--check"], folder=tmp_path) == 0
    stray.write_text(changed.read_text())
    changed.write_text(changed.read_text().replace("--seed 1234", "--seed 1"))
    assert recipes.main(["--check"], folder=tmp_path) == 1
    told = capsys.readouterr().err
    assert f"{changed} is out of date" in told
    assert f"{stray} is not in the table" in told
    assert recipes.main([], folder=tmp_path) == 0
    assert not stray.exists()
    assert recipes.main(["--check"], folder=tmp_path) == 0


@pytest.mark.parametrize("node_type", NODE_TYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=path_of)
def test_it_is_valid_on_the_cards_that_it_names(project: Path, recipe: Recipe, node_type: str) -> None:
    call = record(project, path_of(recipe), **GIVEN, NODE_TYPE=node_type)
    assert call.status == 0, call.err
    words = dict(zip(call.words, call.words[1:], strict=False))
    on_a_node, nodes = int(words["--nproc_per_node"]), int(words["--nnodes"])
    cfg = configuration(call)

    which = list(NODE_TYPES).index(node_type)
    known = PUBLISHED_CARDS.get((recipe.config, recipe.seq_length), recipe.cards)
    assert (cfg.distributed.world_size, cfg.training.seq_length) == (known[which], recipe.seq_length)
    assert on_a_node <= NODE_TYPES[node_type]
    assert nodes == 1 or on_a_node == NODE_TYPES[node_type], "nodes are filled before another one is taken"
    assert node_type == "Snt9b" or on_a_node % 2 == 0, "the dies of a card are used together"
    assert cfg.transformer.tensor_model_parallel_size <= on_a_node, "tensor parallelism stays within a node"

    assert cfg.notices == (), "nothing that is given is without effect"
    assert not set(call.flags) & set(NO_EFFECT)
    assert cfg.checkpoint.load == cfg.checkpoint.save == "some where"
    assert_layers_are_held_once(cfg)
    assert_architecture(cfg, recipe)


def assert_layers_are_held_once(cfg: RunConfig) -> None:
    """megatron-core's own functions say which layers each stage builds."""
    held: list[int] = []
    for rank in range(cfg.transformer.pipeline_model_parallel_size):
        chunks = cfg.transformer.virtual_pipeline_model_parallel_size
        for chunk in range(chunks) if chunks else [None]:
            first = get_transformer_layer_offset(cfg.transformer, chunk, rank)  # pyright: ignore[reportArgumentType]
            count = get_num_layers_to_build(cfg.transformer, chunk, rank)  # pyright: ignore[reportArgumentType]
            assert count > 0
            held += range(first, first + count)
    assert sorted(held) == list(range(cfg.transformer.num_layers))


def assert_architecture(cfg: RunConfig, recipe: Recipe) -> None:
    """As transformers reads the published configuration (tests/unit/models/test_published.py proves that one)."""
    theirs, whole = shallow(recipe.config).config, hf_config(recipe.config)
    t, m = cfg.transformer, cfg.model
    assert m.hf_config == recipe.config
    assert t.num_layers == (whole.get("num_hidden_layers") or whole["num_layers"])
    assert (t.hidden_size, t.ffn_hidden_size, t.num_attention_heads, t.num_query_groups) == (
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert t.kv_channels == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    rope = theirs.rope_parameters
    assert (t.layernorm_epsilon, m.rotary_base) == (theirs.rms_norm_eps, rope["rope_theta"])
    assert m.rotary_percent == rope.get("partial_rotary_factor", 1.0)
    assert (m.vocab_size, m.padded_vocab_size) == (theirs.vocab_size, theirs.vocab_size), "no row is made up"
    assert m.untie_embeddings_and_output_weights is not theirs.tie_word_embeddings
    assert (t.hidden_dropout, t.attention_dropout) == (0.0, theirs.attention_dropout)


@pytest.mark.parametrize("recipe", RECIPES, ids=path_of)
def test_tiny_is_valid_on_two_processes(project: Path, recipe: Recipe) -> None:
    call = record(project, path_of(recipe), TINY="1", VALIDATE_ONLY="1")
    assert (call.program, call.world) == ("python", "2"), call.err
    cfg = configuration(call)
    t = cfg.transformer
    assert (t.num_layers, t.hidden_size, cfg.model.vocab_size) == (4, 64, 4096)
    split = t.tensor_model_parallel_size * t.pipeline_model_parallel_size
    assert split == min(2, recipe.tp * recipe.pp), "what the layout is made of stays, as far as two processes go"
    assert (t.virtual_pipeline_model_parallel_size is None) is (recipe.layers_per_stage is None)
    full = record(project, path_of(recipe), **GIVEN)
    kept = [word for word in full.flags if word.startswith("--")]
    assert [word for word in call.flags if word.startswith("--")][: len(kept)] == kept, "the flags are the same"


def test_what_is_missing_is_told_at_once(project: Path) -> None:
    call = record(project, "qwen25/pretrain_qwen25_7b", CKPT_LOAD_DIR="nowhere", DATA_PATH="0.3 nowhere/a 0.7 /tmp")
    assert (call.status, call.program) == (2, "")
    lines = call.err.splitlines()
    assert [line.split()[1] for line in lines] == ["DATA_PATH:", "TOKENIZER_PATH", "CKPT_SAVE_DIR", "CKPT_LOAD_DIR:"]
    assert "there is no nowhere/a " in lines[0]
    data = record(project, "qwen25/data_qwen25_pretrain")
    assert [line.split()[1] for line in data.err.splitlines()] == ["INPUT_PATH", "TOKENIZER_PATH"]
    wrong = record(project, "qwen25/pretrain_qwen25_7b", **GIVEN, NODE_TYPE="A2")
    assert (wrong.status, wrong.program) == (2, "")
    assert "Snt9b or Snt9b23" in wrong.err


def test_variables_and_further_flags_reach_the_command(project: Path, tmp_path: Path) -> None:
    variables = {
        "TP": "4",
        "PP": "2",
        "SEQ_LENGTH": "8192",
        "MBS": "2",
        "GBS": "64",
        "TRAIN_ITERS": "48",
        "LR": "1e-5",
        "NPUS_PER_NODE": "8",
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "7000",
        "CKPT_LOAD_DIR": str(tmp_path),
        "DATA_PATH": f"0.3 {TEXT} 0.7 {TEXT}",
    }
    call = record(project, "qwen25/pretrain_qwen25_7b", "--seed", "7", **(GIVEN | variables))
    assert call.status == 0, call.err
    launch = "--nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr node0 --master_port 7000 pretrain_gpt.py"
    assert " ".join(call.words).startswith(launch)
    assert call.folder == str(project)
    cfg = configuration(call)
    sizes = cfg.transformer
    assert (sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size) == (4, 2)
    t = cfg.training
    assert (t.seq_length, t.micro_batch_size, t.global_batch_size, t.train_iters, t.seed) == (8192, 2, 64, 48, 7)
    assert (cfg.optimizer.lr, cfg.checkpoint.pretrained_checkpoint) == (1e-5, str(tmp_path))
    assert cfg.data.data_path == ("0.3", str(TEXT), "0.7", str(TEXT))
    with pytest.raises(ConfigError, match="--reset-attention-mask"):
        configuration(record(project, "qwen25/pretrain_qwen25_7b", "--reset-atention-mask", **GIVEN))


def test_the_log_is_kept_and_the_status_is_the_run_s(project: Path) -> None:
    assert record(project, "llama2/pretrain_llama2_7b", **GIVEN, NODE_RANK="0", STATUS="3").status == 3
    assert (project / "logs" / "pretrain_llama2_7b_0.log").read_text() == "told\n"
    assert record(project, "llama2/pretrain_llama2_7b", "--validate-only", **GIVEN, STATUS="2").status == 2


@pytest.mark.parametrize("model", MODELS)
def test_data_recipes_are_read_by_preprocess_data(project: Path, model: str) -> None:
    call = record(project, f"{model}/data_{model}_pretrain", INPUT_PATH=f"{TEXT} {TEXT}", TOKENIZER_PATH=str(MODEL))
    assert (call.status, call.program) == (0, "python"), call.err
    arguments = preprocess.parse(call.flags)
    assert (arguments.input, arguments.output_prefix) == ([str(TEXT)] * 2, f"dataset/{model}")
    assert arguments.append_eod


@pytest.mark.parametrize("recipe", CONVERTED, ids=lambda recipe: f"{recipe.model}_{recipe.size}")
def test_conversions_cut_a_model_as_its_pretraining_does(project: Path, recipe: Recipe) -> None:
    script = f"{recipe.model}/convert_{recipe.model}_{recipe.size}"
    given = {"LOAD_DIR": str(MODEL), "SAVE_DIR": "some where"}
    call = record(project, f"{script}_hf2mcore", **given, SAVE_FORMAT="legacy")
    assert (call.status, call.program) == (0, "python"), call.err
    there = convert.settings_of(convert.parse(call.flags))
    assert (there.load_kind, there.save_kind, there.save_format) == ("hf", "mg", "legacy")
    assert (there.load, there.save) == (MODEL, Path("some where"))
    target = there.target or Target()
    check_target(target, described_model(hf_config(recipe.config), None, MODEL)[1])
    assert (target.tp, target.pp, target.layers_per_virtual_stage) == (recipe.tp, recipe.pp, recipe.layers_per_stage)
    stages = target.layer_list
    assert (stages and (stages[0], stages[-1])) == recipe.ends

    call = record(project, f"{script}_mcore2hf", **given, HF_CFG_DIR="a folder")
    assert (call.status, call.program) == (0, "python"), call.err
    back = convert.settings_of(convert.parse(call.flags))
    assert (back.load_kind, back.save_kind, back.target) == ("mg", "hf", None)
    assert (back.load, back.save, back.hf_config) == (MODEL, Path("some where"), Path("a folder"))


def test_conversions_check_paths_and_plan_only(project: Path) -> None:
    script = "qwen3/convert_qwen3_8b"
    for way in ("hf2mcore", "mcore2hf"):
        missing = record(project, f"{script}_{way}", LOAD_DIR="nowhere")
        assert (missing.status, missing.program) == (2, "")
        assert [line.split()[1] for line in missing.err.splitlines()] == ["LOAD_DIR:", "SAVE_DIR"]
        given = {"LOAD_DIR": str(MODEL), "SAVE_DIR": "some where"}
        planned = record(project, f"{script}_{way}", **given, VALIDATE_ONLY="1", STATUS="2")
        assert planned.status == 2
        assert convert.parse(planned.flags).dry_run
        more = record(project, f"{script}_{way}", "--num-layers", "2", **given)
        assert (more.status, convert.parse(more.flags).num_layers) == (0, 2)
    there = convert.settings_of(convert.parse(record(project, f"{script}_hf2mcore", **given).flags))
    assert (there.save_format, there.target) == ("torch_dist", None), "files without a layout need none"
