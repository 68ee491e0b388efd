"""Rules of the model, the length of a run, its schedules, numbers, data and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from mindspeed_llm.config.exposed import INTERNAL
from mindspeed_llm.config.no_effect import NO_EFFECT
from mindspeed_llm.config.option import names
from mindspeed_llm.config.refused import refusal
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.config.schema import field_table
from mindspeed_llm.errors import ConfigError

POSITIVE = names(
    """tensor_model_parallel_size pipeline_model_parallel_size micro_batch_size global_batch_size seq_length
    max_position_embeddings vocab_size make_vocab_size_divisible_by ffn_hidden_size kv_channels num_query_groups
    save_interval save_hf_interval save_retain_interval save_total_limit non_persistent_save_interval
    eval_interval exit_interval exit_duration_in_mins log_interval
    tensorboard_log_interval distributed_timeout_minutes recompute_num_layers bucket_size peak_tflops layernorm_epsilon
    rotary_base rope_scaling_factor loss_scale initial_loss_scale num_dataset_builder_threads
    num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk moe_router_num_groups
    moe_router_group_topk moe_router_topk_scaling_factor moe_expert_capacity_factor expert_model_parallel_size
    expert_tensor_parallel_size n_shared_experts moe_z_loss_coeff"""
)

NOT_NEGATIVE = names(
    """train_iters train_samples eval_iters lr min_lr weight_decay clip_grad lr_warmup_iters
    lr_warmup_samples lr_warmup_init num_workers seed init_method_std manual_gc_interval
    adam_eps moe_router_bias_update_rate"""
)

BELOW_ONE = ("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2", "moe_input_jitter_eps")

RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (POSITIVE, lambda value: value > 0, "above 0"),
    (NOT_NEGATIVE, lambda value: value >= 0, "0 or more"),
    (BELOW_ONE, lambda value: 0 <= value < 1, "from 0 to below 1"),
    (("loss_spike_factor",), lambda value: value > 1, "above 1"),
)

# megatron-core's recomputation of norms calls TransformerEngine even without FP8.
RECOMPUTED = ("core_attn", "mlp")


def numbers_are_in_range(cfg: RunConfig) -> Iterator[ConfigError]:
    """Sizes and intervals are above 0, counts and rates not below it, probabilities below 1."""
    for group, holds, allowed in RANGES:
        for name in group:
            value = cfg.value(name)
            if isinstance(value, (int, float)) and not (math.isfinite(value) and holds(value)):
                flag = field_table()[name].flag
                yield ConfigError(f"{flag} is out of range", got=value, allowed=allowed, fix=flag)


def architecture_is_known(cfg: RunConfig) -> Iterator[ConfigError]:
    """The sizes without which there is no model."""
    t = cfg.transformer
    sizes = {
        "--num-layers": t.num_layers,
        "--hidden-size": t.hidden_size,
        "--num-attention-heads": t.num_attention_heads,
        "--max-position-embeddings": cfg.model.max_position_embeddings or 0,
    }
    missing = [flag for flag, value in sizes.items() if value < 1]
    if missing:
        yield ConfigError(
            f"the architecture is incomplete: {', '.join(missing)}",
            fix="give these flags, --hf-config PATH, or --load of a Hugging Face folder",
        )


def hidden_fields_are_untouched(cfg: RunConfig) -> Iterator[ConfigError]:
    """Fields of megatron-core without a flag here keep their default, however a value reached them."""
    for name, spec in field_table().items():
        if spec.section not in ("transformer", "optimizer", "ddp") or spec.has_flag or name in INTERNAL:
            continue
        value = cfg.value(name)
        if value != spec.default:
            row = refusal(spec.flag)
            why = row.told if row else NO_EFFECT[spec.flag].reason
            yield ConfigError(f"{name} is not available: {why}", got=value, allowed=spec.default)


def implementation_is_local(cfg: RunConfig) -> Iterator[ConfigError]:
    """TransformerEngine exists on CUDA alone, and its layers are not used here."""
    if cfg.transformer.transformer_impl != "local":
        yield ConfigError(
            "the layers do not use TransformerEngine",
            got=f"--transformer-impl {cfg.transformer.transformer_impl}",
            allowed="local",
            fix="--transformer-impl local, or leave it out",
        )


def positions_fit(cfg: RunConfig) -> Iterator[ConfigError]:
    """Positions reach as far as the sequence, and rotary options are complete."""
    m, length = cfg.model, cfg.training.seq_length
    # Dynamic scaling is for sequences beyond it, and stretches by how much they are.
    longest = None if m.rope_scaling_type == "dynamic" else m.max_position_embeddings
    if longest is not None and length is not None and length > longest:
        yield ConfigError(
            "the sequence is longer than the positions that the model is made for",
            got=f"--seq-length {length}, --max-position-embeddings {longest}",
            allowed=f"{longest} or fewer",
            fix="--seq-length or --max-position-embeddings",
        )
    if not 0 < m.rotary_percent <= 1:
        yield ConfigError("--rotary-percent is out of range", got=m.rotary_percent, allowed="above 0, up to 1")
    rotary = m.position_embedding_type == "rope"
    if not rotary and m.rope_scaling_type:
        yield ConfigError(
            "scaling of rotary positions needs rotary positions",
            got=f"--position-embedding-type {m.position_embedding_type}",
            allowed="rope",
            fix="--position-embedding-type rope",
        )
    if m.rope_scaling_type is not None:
        if m.rope_scaling_factor is None:
            yield ConfigError(f"{m.rope_scaling_type} scaling of positions needs a factor", fix="--rope-scaling-factor")
    elif m.rope_scaling_factor is not None:
        yield ConfigError(
            "a scaling factor of positions needs a kind of scaling",
            got=f"--rope-scaling-factor {m.rope_scaling_factor}",
            fix="--rope-scaling-type, or --use-rope-scaling for Llama 3.1's",
        )
    if m.rope_scaling_type == "llama3" and m.low_freq_factor >= m.high_freq_factor:
        yield ConfigError(
            "llama3 scaling needs a low frequency factor below the high one",
            got=f"--low-freq-factor {m.low_freq_factor}, --high-freq-factor {m.high_freq_factor}",
            fix="--low-freq-factor or --high-freq-factor",
        )


def layers_are_possible(cfg: RunConfig) -> Iterator[ConfigError]:
    """Activation, fusion and recomputation that megatron-core can build."""
    t, activation = cfg.transformer, cfg.model.activation_func
    if t.bias_activation_fusion:
        plain = not t.gated_linear_unit
        unbuilt = {
            "squared_relu": True,
            "gelu": plain and not t.add_bias_linear,
            "gelu_tanh": True,
            "quick_gelu": plain,
            "silu": plain,
        }
        if unbuilt[activation]:
            yield ConfigError(
                "there is no fused form of this activation",
                got=f"{activation}, {'plain' if plain else 'gated'}, {'with' if t.add_bias_linear else 'without'} bias",
                allowed="gated silu, gelu or quick_gelu; plain gelu with bias",
                fix="--swiglu, or leave out --use-fused-swiglu",
            )
    full, method = t.recompute_granularity == "full", t.recompute_method
    if full and (method is None or t.recompute_num_layers is None):
        yield ConfigError(
            "full recomputation needs a method and a number of layers",
            fix="--recompute-method uniform or block, and --recompute-num-layers",
        )
    if t.recompute_granularity == "selective" and (method is not None or t.recompute_num_layers is not None):
        yield ConfigError(
            "selective recomputation chooses modules, not layers",
            got="--recompute-method or --recompute-num-layers",
            fix="--recompute-modules, or --recompute-granularity full",
        )
    unknown = [name for name in t.recompute_modules or () if name not in RECOMPUTED]
    if unknown:
        yield ConfigError(
            "this cannot be recomputed", got=" ".join(unknown), allowed=" ".join(RECOMPUTED), fix="--recompute-modules"
        )
    if "mlp" in (t.recompute_modules or ()) and t.add_bias_linear:
        # It returns the bias beside its output, and autograd then takes the parameter for a result of the block.
        yield ConfigError(
            "the recomputation of mlp never ends where linear layers have biases",
            fix="--disable-bias-linear, or another of --recompute-modules",
        )
    if t.distribute_saved_activations and (not full or t.tensor_model_parallel_size < 2 or t.sequence_parallel):
        yield ConfigError(
            "--distribute-saved-activations shares what full recomputation saves between tensor-parallel ranks that "
            "would hold the same",
            fix="--recompute-granularity full and a tensor-parallel size above 1, without --sequence-parallel",
        )
    yield from _norms_and_positions_are_possible(cfg)
    if t.window_attn_skip_freq is not None and t.window_size is None:
        yield ConfigError("--window-attn-skip-freq chooses layers with a window", fix="--window-size")
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        pattern = t.window_attn_skip_freq if name == "window_attn_skip_freq" else t.no_rope_freq
        if isinstance(pattern, tuple) and len(pattern) != t.num_layers:
            yield ConfigError(
                f"{field_table()[name].flag} does not name every layer",
                got=f"{len(pattern)} entries for {t.num_layers} layers",
            )


def _norms_and_positions_are_possible(cfg: RunConfig) -> Iterator[ConfigError]:
    t, m = cfg.transformer, cfg.model
    if m.qk_norm_after_rotary and (not t.qk_layernorm or m.kv_lora_rank is not None):
        yield ConfigError(
            "--qk-norm-after-rotary says where the norms of --qk-layernorm stand; latent attention norms latents",
            got=f"--qk-layernorm {t.qk_layernorm}, --kv-lora-rank {m.kv_lora_rank}",
            fix="--qk-layernorm, without --kv-lora-rank",
        )
    if m.qk_norm_over_heads:
        if t.qk_layernorm or t.normalization != "RMSNorm":
            yield ConfigError(
                "--qk-norm-over-heads is an RMSNorm in the place of --qk-layernorm",
                got=f"{t.normalization}, --qk-layernorm {t.qk_layernorm}",
                fix="--normalization RMSNorm, without --qk-layernorm",
            )
        groups = t.num_query_groups or t.num_attention_heads
        if t.tensor_model_parallel_size > 0 and groups % t.tensor_model_parallel_size:
            yield ConfigError(
                "the norm over all heads of the keys needs whole KV heads on each tensor-parallel rank",
                got=f"{groups} KV heads, tensor-model-parallel-size {t.tensor_model_parallel_size}",
                fix="a --tensor-model-parallel-size that divides the KV heads",
            )
    if m.rotary_base_local is not None and (t.window_size is None or m.position_embedding_type != "rope"):
        yield ConfigError(
            "--rotary-base-local is the base of rotary layers with a window",
            got=f"{m.position_embedding_type}, window {t.window_size}",
            fix="--window-size and --position-embedding-type rope",
        )
    if m.rope_scaling_type == "longrope" and t.kv_channels:
        pairs = int(t.kv_channels * m.rotary_percent) // 2
        for name, factors in (("--long-factor", m.long_factor), ("--short-factor", m.short_factor)):
            if len(factors or ()) != pairs:
                yield ConfigError(
                    f"longrope needs a {name} for each rotated pair of channels",
                    got=f"{len(factors or ())} numbers",
                    allowed=f"{pairs}",
                )


def precision_is_one(cfg: RunConfig) -> Iterator[ConfigError]:
    """One 16-bit format, and options that need one."""
    t = cfg.transformer
    if t.bf16 and t.fp16:
        yield ConfigError("a run computes in one number format", got="--bf16 and --fp16", fix="leave one of them out")
    if cfg.optimizer.loss_scale is not None and not (t.fp16 or t.bf16):
        yield ConfigError(
            "the loss is scaled only for a model in 16 bits",
            got=f"--loss-scale {cfg.optimizer.loss_scale}",
            fix="--fp16, or leave it out",
        )


def run_has_one_unit(cfg: RunConfig) -> Iterator[ConfigError]:
    """A run is measured in steps or in sequences, and its schedules in the same unit."""
    r, s = cfg.training, cfg.schedule
    if r.train_iters is not None and r.train_samples is not None:
        yield ConfigError(
            "the length of the run is given twice",
            got=f"--train-iters {r.train_iters}, --train-samples {r.train_samples}",
            fix="leave one of them out",
        )
        return
    other = "samples" if r.train_samples is None else "iters"
    foreign = {f"lr_decay_{other}": None, f"lr_warmup_{other}": 0, f"lr_wsd_decay_{other}": None}
    if r.train_iters is not None or r.train_samples is not None:
        for name, default in foreign.items():
            if cfg.value(name) != default:
                yield ConfigError(
                    f"the run is measured in {'iterations' if other == 'samples' else 'samples'}, its schedule too",
                    got=f"{field_table()[name].flag} {cfg.value(name)}",
                    fix=f"use {field_table()[name.replace(other, 'iters' if other == 'samples' else 'samples')].flag}",
                )
    if r.rampup_batch_size is not None and r.train_iters is not None:
        yield ConfigError(
            "a batch ramp-up needs a run that is measured in samples",
            got=f"--train-iters {r.train_iters}",
            fix="--train-samples",
        )
    if s.lr_warmup_fraction is not None and (s.lr_warmup_iters or s.lr_warmup_samples):
        yield ConfigError("the warm-up is given twice", fix="leave out --lr-warmup-fraction or the warm-up in numbers")


def training_is_complete(cfg: RunConfig) -> Iterator[ConfigError]:
    """A pretraining run has a length, batches of a known shape, a learning rate and data."""
    r = cfg.training
    if r.train_iters is None and r.train_samples is None and not r.skip_train:
        yield ConfigError("the length of the run is unknown", fix="--train-iters N or --train-samples N")
    length = r.train_samples if r.train_iters is None else r.train_iters
    trains = not r.skip_train and length != 0
    evaluates = r.skip_train and r.eval_iters > 0
    if trains or evaluates:
        needed = {"--seq-length": r.seq_length, "--micro-batch-size": r.micro_batch_size}
        missing = [flag for flag, value in needed.items() if value is None]
        if missing:
            yield ConfigError(f"batches have no shape: {', '.join(missing)} missing", fix="give these flags")
    if trains and cfg.optimizer.lr is None:
        yield ConfigError("there is no learning rate", fix="--lr")
    if (trains or evaluates) and not any(_data_sources(cfg).values()):
        yield ConfigError("there is no data", fix="--data-path PATH, or --mock-data to try a set-up without any")


def schedules_are_complete(cfg: RunConfig) -> Iterator[ConfigError]:
    """The parts of learning-rate and weight-decay schedules fit together."""
    s, o, r = cfg.schedule, cfg.optimizer, cfg.training
    if o.lr is not None and o.min_lr is not None and o.min_lr > o.lr:
        yield ConfigError(
            "the lowest learning rate is above the highest", got=f"--min-lr {o.min_lr}, --lr {o.lr}", fix="--min-lr"
        )
    if s.lr_warmup_fraction is not None and not 0 <= s.lr_warmup_fraction <= 1:
        yield ConfigError("--lr-warmup-fraction is out of range", got=s.lr_warmup_fraction, allowed="from 0 to 1")
    in_samples = r.train_samples is not None
    decay = s.lr_decay_samples if in_samples else s.lr_decay_iters
    warmup = s.lr_warmup_samples if in_samples else s.lr_warmup_iters
    unit = "samples" if in_samples else "iters"
    if decay and warmup >= decay:
        yield ConfigError(
            "the warm-up takes the whole decay of the learning rate",
            got=f"--lr-warmup-{unit} {warmup}, --lr-decay-{unit} {decay}",
            allowed=f"a warm-up below {decay}",
            fix=f"--lr-warmup-{unit}",
        )
    if s.lr_decay_style == "WSD":
        last = s.lr_wsd_decay_samples if in_samples else s.lr_wsd_decay_iters
        if last is None or (decay and not 0 < last <= decay):
            yield ConfigError(
                "the WSD schedule needs the length of its last phase",
                got=last,
                allowed=f"from 1 to {decay}" if decay else None,
                fix=f"--lr-wsd-decay-{unit}",
            )
    if s.override_opt_param_scheduler and s.use_checkpoint_opt_param_scheduler:
        yield ConfigError(
            "the schedule comes from the command line or from the checkpoint, not from both",
            fix="leave out --override-opt-param-scheduler or --use-checkpoint-opt-param-scheduler",
        )
    ends = (s.start_weight_decay, s.end_weight_decay)
    if s.weight_decay_incr_style == "constant":
        if any(end not in (None, o.weight_decay) for end in ends):
            yield ConfigError(
                "a constant weight decay has no start and end",
                got=f"--start-weight-decay {ends[0]}, --end-weight-decay {ends[1]}, --weight-decay {o.weight_decay}",
                fix="--weight-decay-incr-style linear or cosine",
            )
    elif None in ends or not 0 <= (ends[0] or 0) <= (ends[1] or 0):
        yield ConfigError(
            "a weight decay that grows needs its start and its end, from 0 upwards",
            got=f"--start-weight-decay {ends[0]}, --end-weight-decay {ends[1]}",
            fix="--start-weight-decay and --end-weight-decay",
        )


def data_has_one_source(cfg: RunConfig) -> Iterator[ConfigError]:
    """Data comes from one place, in shares that are shares."""
    d = cfg.data
    given = [flag for flag, value in _data_sources(cfg).items() if value]
    if len(given) > 1:
        yield ConfigError("there is more than one source of data", got="; ".join(given), fix="leave all but one out")
    if d.split is not None and not _is_split(d.split):
        yield ConfigError(
            "--split is no list of shares", got=d.split, allowed="up to three numbers, such as 99,1,0", fix="--split"
        )


def fim_is_complete(cfg: RunConfig) -> Iterator[ConfigError]:
    """Shares of filling in the middle are shares, and have what they are shares of."""
    d = cfg.data
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        value = cfg.value(name)
        if isinstance(value, (int, float)) and not 0 <= value <= 1:
            flag = field_table()[name].flag
            yield ConfigError(f"{flag} is out of range", got=value, allowed="from 0 to 1", fix=flag)
    if (d.fim_split_sample is None) != (d.fim_fragment_rate is None):
        yield ConfigError(
            "fragments of a sample need both a token to split at and a rate",
            got="--fim-fragment-rate" if d.fim_split_sample is None else "--fim-split-sample",
            allowed="both or neither",
            fix="--fim-split-sample TOKEN --fim-fragment-rate RATE",
        )
    if d.fim_data and d.mock_data:
        yield ConfigError("made-up data holds no text to fill in", got="--fim-data --mock-data", fix="--data-path")


def data_lists_are_blends(cfg: RunConfig) -> Iterator[ConfigError]:
    """A list of data is paths alone, or weights and paths in turn."""
    d = cfg.data
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words: tuple[str, ...] = getattr(d, name) or ()
        weights = [_weight(word) for word in words]
        numbers = [word for word, weight in zip(words, weights, strict=True) if weight is not None]
        if not numbers:
            continue
        flag = field_table()[name].flag
        if len(words) % 2 or None in weights[::2]:
            yield ConfigError(
                f"{flag} is neither paths alone nor weights and paths in turn",
                got=f"{' '.join(words)}: {len(numbers)} numbers ({', '.join(numbers)}) among {len(words)} words",
                allowed="PATH ..., or WEIGHT PATH WEIGHT PATH ...",
                fix=f"{flag}; a path that looks like a number is written ./0.5",
            )
        elif any(weight is None or not math.isfinite(weight) or weight < 0 for weight in weights[::2]):
            yield ConfigError(f"{flag} has a weight that is no share", got=" ".join(words[::2]), allowed="0 or more")


def _weight(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _data_sources(cfg: RunConfig) -> dict[str, object]:
    d = cfg.data
    return {
        "--mock-data": d.mock_data,
        "--data-path": d.data_path,
        "--data-args-path": d.data_args_path,
        "--train-data-path, --valid-data-path or --test-data-path": d.train_data_path
        or d.valid_data_path
        or d.test_data_path,
        "--per-split-data-args-path": d.per_split_data_args_path,
    }


def _is_split(text: str) -> bool:
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        return False
    return len(shares) <= 3 and all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0


def tokenizer_is_complete(cfg: RunConfig) -> Iterator[ConfigError]:
    """A tokenizer is read from somewhere, or is none but a vocabulary size."""
    k = cfg.tokenizer
    if k.tokenizer_type == "NullTokenizer" and cfg.model.vocab_size is None:
        yield ConfigError("NullTokenizer knows no vocabulary", fix="--vocab-size")
    from_files = k.tokenizer_type in ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
    if not from_files and (k.vocab_file or k.merge_file):
        yield ConfigError(
            "this kind of tokenizer has no vocabulary file",
            got=f"--tokenizer-type {k.tokenizer_type}, --vocab-file {k.vocab_file}, --merge-file {k.merge_file}",
            fix="--tokenizer-type GPT2BPETokenizer, BertWordPieceLowerCase or BertWordPieceCase",
        )
    if from_files:
        if k.vocab_file is None:
            yield ConfigError(f"--tokenizer-type {k.tokenizer_type} is read from a vocabulary", fix="--vocab-file")
        if k.merge_file is None and k.tokenizer_type == "GPT2BPETokenizer":
            yield ConfigError("--tokenizer-type GPT2BPETokenizer needs the merges, too", fix="--merge-file")
    elif k.tokenizer_type not in (None, "NullTokenizer") and k.tokenizer_name_or_path is None:
        yield ConfigError(f"--tokenizer-type {k.tokenizer_type} is read from a folder", fix="--tokenizer-name-or-path")


def files_have_a_place(cfg: RunConfig) -> Iterator[ConfigError]:
    """Intervals of saving have a place to save to."""
    c = cfg.checkpoint
    if c.save is None:
        wanting = ("save_retain_interval", "save_total_limit", "non_persistent_save_interval")
        for name in wanting:
            if getattr(c, name) is not None:
                flag = field_table()[name].flag
                yield ConfigError(f"{flag} has no folder to save to", got=getattr(c, name), fix="--save DIR")
    if c.save_hf_interval is not None and c.save_hf is None:
        yield ConfigError("--save-hf-interval has no folder to write to", fix="--save-hf DIR")
    if cfg.checkpoint.ckpt_step is not None and c.load is None:
        yield ConfigError("--ckpt-step names a checkpoint of --load", fix="--load DIR")


def packages_are_installed(cfg: RunConfig) -> Iterator[ConfigError]:
    """What a run reports to has its package, which is found before time is spent."""
    wanted = (
        ("--wandb-project", cfg.logging.wandb_project, "wandb"),
        ("--tensorboard-dir", cfg.logging.tensorboard_dir, "tensorboard"),
    )
    for flag, value, package in wanted:
        if value is not None and find_spec(package) is None:
            yield ConfigError(
                f"{flag} needs a package that is not installed", got=package, fix=f"pip install {package}"
            )


# Causes before what may follow from them.
RUN_RULES = (
    architecture_is_known,
    numbers_are_in_range,
    hidden_fields_are_untouched,
    implementation_is_local,
    positions_fit,
    layers_are_possible,
    precision_is_one,
    run_has_one_unit,
    schedules_are_complete,
    data_has_one_source,
    data_lists_are_blends,
    fim_is_complete,
    tokenizer_is_complete,
    files_have_a_place,
    packages_are_installed,
)

TRAINING_RULES = (training_is_complete,)
