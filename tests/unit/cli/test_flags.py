"""The command line of a pretraining run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.cli.flags import build_parser, parse_pretrain
from mindspeed_llm.config.resolve import Layer, from_values
from mindspeed_llm.config.run import SECTIONS, RunConfig
from mindspeed_llm.config.schema import field_table
from mindspeed_llm.config.spelled import meanings, unknown_flag
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.tools.flag_pages import upstream_flags

TINY = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 32
    --micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data""".split()  # noqa: SIM905 a command line

# The shape of MindSpeed-LLM's dense recipes (reference: section 6.3 of the upstream inventory), with every dense flag
# that at least 20 of its 163 pretraining recipes carry.
RECIPE = """
    --use-flash-attn --use-fused-rotary-pos-emb --use-rotary-position-embeddings --use-fused-swiglu --use-fused-rmsnorm
    --no-masked-softmax-fusion --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --global-batch-size 8 --lr 1.25e-6 --lr-decay-style cosine --min-lr 1.25e-7 --weight-decay 1e-1
    --lr-warmup-fraction 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.01 --clip-grad 1.0
    --adam-beta1 0.9 --adam-beta2 0.95 --initial-loss-scale 4096 --seed 42 --bf16 --train-iters 2000 --seq-length 4096
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2
    --sequence-parallel --context-parallel-size 1 --no-shared-storage --no-gradient-accumulation-fusion
    --use-mcore-models --num-layers 8 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --kv-channels 32
    --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --add-qkv-bias --qk-layernorm --untie-embeddings-and-output-weights
    --attention-softmax-in-fp32 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 1000000
    --rope-scaling-type yarn --rope-scaling-factor 4.0 --rope-scaling-original-max-position-embeddings 1024
    --rope-scaling-mscale 1.0 --rope-scaling-mscale-all-dim 1.0 --beta-fast 32 --beta-slow 1
    --make-vocab-size-divisible-by 1 --vocab-size 151936 --padded-vocab-size 151936 --ckpt-format torch
    --tokenizer-type PretrainedFromHF --tokenizer-name-or-path ./tokenizer --data-path ./data/text_document
    --split 100,0,0 --log-interval 1 --save-interval 2000 --eval-interval 2000 --eval-iters 0 --no-load-optim
    --no-load-rng --no-save-optim --no-save-rng --load ./in --save ./out --enable-hf2mg-convert --model-type-hf qwen3
    --log-throughput --recompute-granularity full --recompute-method block --recompute-num-layers 1
    --distributed-backend nccl --transformer-impl local
"""


def parse(*argv: str, environ: Mapping[str, str] | None = None, **more: Any) -> RunConfig:
    return parse_pretrain([*argv], environ=environ or {}, **more)


def refused(*argv: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*TINY, *argv, **more)
    return str(caught.value)


def test_a_recipe_runs_unchanged() -> None:
    cfg = parse(*RECIPE.split(), environ={"WORLD_SIZE": "8"})
    t = cfg.transformer
    assert (t.add_bias_linear, t.add_qkv_bias, t.layernorm_epsilon, t.num_query_groups) == (False, True, 1e-6, 2)
    assert (t.gated_linear_unit, cfg.model.activation_func, t.bias_activation_fusion) == (True, "silu", True)
    assert (t.virtual_pipeline_model_parallel_size, t.batch_p2p_comm) == (2, False)
    assert cfg.distributed.data_parallel_size == 2
    assert cfg.model.position_embedding_type == "rope"
    assert cfg.data.no_shared_storage is True
    assert "--use-mcore-models has no effect here" in "\n".join(cfg.notices)


def test_help_imports_neither_torch_nor_megatron_nor_transformers() -> None:
    program = """
import sys
from mindspeed_llm.cli.flags import parse_pretrain
try:
    parse_pretrain(["--help"], environ={})
except SystemExit as leaving:
    assert not leaving.code
heavy = {"torch", "megatron", "megatron.core", "transformers", "numpy"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    for section in SECTIONS:
        assert f"\n{section}:\n" in result.stdout
    assert "--tensor-model-parallel-size" in result.stdout


def test_parsing_imports_neither_torch_nor_megatron() -> None:
    program = f"""
import sys
from mindspeed_llm.cli.flags import parse_pretrain
parse_pretrain({TINY!r}, environ={{}})
sys.exit(bool({{"torch", "megatron.core", "transformers"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=100, check=False).returncode == 0


def test_help_has_a_text_for_every_flag() -> None:
    parser = build_parser("x", with_help=True)
    assert [action.option_strings for action in parser._actions if not action.help] == []
    parser.format_help()


def test_every_upstream_flag_is_accepted_or_refused_with_a_reason() -> None:
    names = [flag.name for flag in upstream_flags() if "train" in (*flag.megatron, *flag.mindspeed)]
    assert len(names) > 900
    unknown = [
        name
        for name in names
        if f"--{name}" not in meanings() and "is not a known" in str(unknown_flag(f"--{name}", ""))
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("--context-parallel-algo adaptive_cp_algo", "planned with context parallelism, step 7"),
        ("--handler-name AlpacaStyleInstructionHandler", "planned with instruction tuning, step 8"),
        ("--loss-compute-mode chunk", "planned with the memory features, step 10"),
        ("--spec mindspeed_llm.tasks.models.spec.mamba_spec layer_spec", "--spec names layers that are not built"),
    ],
)
def test_a_flag_that_changes_nothing_with_one_value_is_refused_with_others(argv: str, reason: str) -> None:
    assert reason in refused(*argv.split())


def test_precedence_from_family_to_command_line(tmp_path: Path) -> None:
    """Each source says one thing more than the next, so every step of the order shows."""
    fields = ["num_workers", "seed", "eval_iters", "log_interval"]

    def family(given: Mapping[str, Any]) -> Layer:
        assert given["hf_config"] == "somewhere"
        return Layer("config.json", dict.fromkeys(fields, 1))

    path = tmp_path / "run.yaml"
    path.write_text("\n".join(f"{name}: 2" for name in fields[1:]))
    environ = {f"MINDSPEED_LLM_{name.upper()}": "3" for name in fields[2:]}
    cfg = parse(
        *TINY,
        "--config",
        str(path),
        "--log-interval",
        "4",
        "--hf-config",
        "somewhere",
        environ=environ,
        family_values=family,
    )
    assert [cfg.value(name) for name in fields] == [1, 2, 3, 4]
    assert [cfg.sources[name] for name in fields] == ["config.json", str(path), "environment", "command line"]


def test_family_values_bind_when_weights_are_loaded() -> None:
    binding = Layer("weights", {"num_layers": 2}, binding=True)
    assert "--num-layers contradicts the weights" in refused(family_values=lambda given: binding)


def test_no_family_is_no_layer() -> None:
    assert parse(*TINY, family_values=lambda given: None).transformer.num_layers == 4


def test_config_file_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 5\n")
    assert parse(*TINY, environ={"MINDSPEED_LLM_CONFIG": str(path)}).training.seed == 5


def test_equals_sign_and_repetition() -> None:
    assert parse(*TINY, "--seed=5", "--seed=6").training.seed == 6


def test_flags_are_not_abbreviated() -> None:
    text = refused("--micro-batch", "2", "--tensor-model-parallel", "2")
    assert text.startswith("2 problems")
    assert "did you mean --micro-batch-size" in text


def test_unknown_flag_names_near_ones() -> None:
    assert "--train-itres is not a known option" in refused("--train-itres", "4")


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--moe-alltoall-overlap-comm", "planned with overlapped messages of experts, step 6"),
        ("--num-zero-experts", "wanted with more of mixture of experts"),
        ("--moe-layer-recompute", "planned with the memory features"),
        ("--reuse-fp32-param", "planned with the memory features"),
        ("--cp-window-size", "planned with context parallelism, step 7"),
        ("--fp8-format", "it needs TransformerEngine"),
        ("--tp-comm-overlap", "does nothing"),
        ("--stage", "planned with instruction tuning, step 8"),
        ("--bert-load", "out of scope"),
        ("--batch-size", "use --micro-batch-size"),
        ("--yaml-cfg", "use --config FILE"),
        ("--lora-r", "wanted with post-training beyond instruction tuning, later"),
    ],
)
def test_what_is_lacking_is_refused_by_name_with_a_reason(flag: str, reason: str) -> None:
    text = refused(flag, "8")
    assert f"{flag} is not available" in text
    assert reason in text


def test_missing_value() -> None:
    assert "expected one argument" in refused("--seed")


def test_stray_text() -> None:
    assert "there is text that belongs to no flag\n  got: 3" in refused("--bf16", "3")


def test_problems_of_all_sources_come_together(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("sede: 5\n")
    text = refused("--hidden-size", "wide", "--config", str(path), environ={"MINDSPEED_LLM_LR": "fast"})
    assert text.startswith("3 problems")
    assert str(path) in text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--swiglu", {"gated_linear_unit": True, "activation_func": "silu"}),
        ("--squared-relu", {"activation_func": "squared_relu"}),
        ("--geglu", {"gated_linear_unit": True, "activation_func": "gelu"}),
        ("--quick-geglu", {"gated_linear_unit": True, "activation_func": "quick_gelu"}),
        ("--disable-bias-linear", {"add_bias_linear": False}),
        ("--norm-epsilon 1e-6", {"layernorm_epsilon": 1e-6}),
        ("--apply-layernorm-1p", {"layernorm_zero_centered_gamma": True}),
        ("--use-rotary-position-embeddings", {"position_embedding_type": "rope"}),
        (
            "--position-embedding-type rope --use-rope-scaling",
            {"rope_scaling_type": "llama3", "rope_scaling_factor": 8.0},
        ),
        ("--recompute-activations", {"recompute_granularity": "selective"}),
        ("--no-check-for-nan-in-loss-and-grad", {"check_for_nan_in_loss": False, "check_for_nan_in_grad": False}),
        ("--bf16 --grad-reduce-in-bf16", {"grad_reduce_in_fp32": False}),
        ("--bf16 --no-bf16", {"bf16": False}),
        ("--accumulate-allreduce-grads-in-fp32", {"grad_reduce_in_fp32": True}),
        ("--no-weight-decay-cond-type apply_wd_to_qk_layernorm", {"apply_wd_to_qk_layernorm": True}),
        ("--npu-deterministic", {"deterministic_mode": True}),
        ("--no-initialization", {"perform_initialization": False}),
        ("--no-create-attention-mask-in-dataloader", {"create_attention_mask_in_dataloader": False}),
        ("--no-mmap-bin-files", {"mmap_bin_files": False}),
        ("--disable-log-loss-scale-to-tensorboard", {"log_loss_scale_to_tensorboard": False}),
        ("--no-load-optim --no-save-rng", {"no_load_optim": True, "no_save_rng": True}),
        (
            "--window-size (16,0) --window-attn-skip-freq [1,0]*2",
            {"window_size": (16, 0), "window_attn_skip_freq": (1, 0, 1, 0)},
        ),
        ("--persistent-save-interval 5", {"save_interval": 5}),
        ("--tokenizer-model tok", {"tokenizer_name_or_path": "tok"}),
        ("--hf-save-dir out", {"save_hf": "out"}),
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --qk-layernorm", {"qk_layernorm": True}),
        ("--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec", {"post_norm": True}),
        ("--ddp-bucket-size 4096", {"bucket_size": 4096}),
        ("--untie-embeddings-and-output-weights", {"untie_embeddings_and_output_weights": True}),
        ("--group-query-attention", {"num_query_groups": 1}),
        ("--override-opt_param-scheduler", {"override_opt_param_scheduler": True}),
        ("--train-data-path 0.3 a 0.7 b --no-mock-data", {"train_data_path": ("0.3", "a", "0.7", "b")}),
    ],
)
def test_historical_spellings(argv: str, expected: dict[str, Any]) -> None:
    cfg = parse(*TINY, *argv.split())
    assert {name: cfg.value(name) for name in expected} == expected


# Values that no rule refuses alone.
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**31),
    "bf16": st.booleans(),
    "hidden_dropout": st.floats(0, 0.99),
    "add_bias_linear": st.booleans(),
    "eval_iters": st.integers(0, 1000),
    "adam_eps": st.floats(1e-12, 1e-3),
    "lr_decay_style": st.sampled_from(["constant", "linear", "cosine", "inverse-square-root"]),
    "normalization": st.sampled_from(["LayerNorm", "RMSNorm"]),
    "save": st.text("abc/._-", min_size=1).filter(lambda text: not text.startswith("-")),
    "window_size": st.tuples(st.integers(1, 64), st.just(0)),
    "mmap_bin_files": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sets(st.sampled_from(sorted(DRAWN))))
def test_command_line_environment_and_python_agree(data: st.DataObject, names: set[str]) -> None:
    values = {name: data.draw(DRAWN[name], name) for name in sorted(names)}
    argv: list[str] = []
    for name, value in values.items():
        flag = field_table()[name].flag
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            argv += [flag, *map(str, value)]
        else:
            argv += [flag, str(value)]
    environ = {
        f"MINDSPEED_LLM_{name.upper()}": ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
    }
    line = parse(*TINY, *argv)
    assert line == parse(*TINY, environ=environ)
    base = {name: line.value(name) for name in ("num_layers", "hidden_size", "num_attention_heads")}
    base |= {"max_position_embeddings": 64, "seq_length": 32, "micro_batch_size": 1, "train_iters": 10, "lr": 1e-3}
    assert line == from_values({**base, "mock_data": True, **values})


def test_world_size_must_be_a_number() -> None:
    assert "WORLD_SIZE must be the number of processes" in refused(environ={"WORLD_SIZE": "two"})
