"""Rules of the layout: how layers, heads, sequence, vocabulary and batch are shared between processes."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.errors import ConfigError


def processes_fill_the_model(cfg: RunConfig) -> Iterator[ConfigError]:
    """The number of processes is a multiple of those that hold one copy of the model."""
    sizes = cfg.transformer
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    parts = [getattr(sizes, name) for name in names]
    if min(parts) < 1:
        return
    copy = parts[0] * parts[1] * parts[2]
    world = cfg.distributed.world_size
    if world % copy:
        yield ConfigError(
            f"{world} processes cannot hold copies of a model over {copy} processes",
            got=f"TP {parts[0]} x PP {parts[1]} x CP {parts[2]} = {copy}, WORLD_SIZE {world}",
            allowed=f"a number of processes that is a multiple of {copy}",
            fix="torchrun --nproc_per_node/--nnodes, --tensor-model-parallel-size or --pipeline-model-parallel-size",
        )


def layers_fill_the_stages(cfg: RunConfig) -> Iterator[ConfigError]:
    """Every pipeline rank, and every interleaved stage of it, gets the same number of layers: none is dropped."""
    t, d = cfg.transformer, cfg.distributed
    pipeline, per_stage = t.pipeline_model_parallel_size, d.num_layers_per_virtual_pipeline_stage
    if pipeline < 1 or t.num_layers < 1:
        return
    if per_stage is not None and d.num_virtual_stages_per_pipeline_rank is not None:
        yield ConfigError(
            "interleaved stages are given twice",
            got=f"--num-layers-per-virtual-pipeline-stage {per_stage}, "
            f"--num-virtual-stages-per-pipeline-rank {d.num_virtual_stages_per_pipeline_rank}",
            fix="leave one of them out",
        )
        return
    if t.num_layers_in_first_pipeline_stage is not None or t.num_layers_in_last_pipeline_stage is not None:
        yield from _uneven_stages(cfg)
        return
    # Without the second spelling the number of interleaved stages is only known where layers divide.
    stages = pipeline * (1 if per_stage is not None else t.virtual_pipeline_model_parallel_size or 1)
    unit = pipeline * per_stage if per_stage is not None else stages
    counted = t.num_layers + t.account_for_embedding_in_pipeline_split + t.account_for_loss_in_pipeline_split
    if unit < 1 or counted % unit == 0:
        return
    yield ConfigError(
        f"{counted} layers cannot be shared equally: {counted % unit} of them would belong to no stage",
        got=f"{_layers(cfg)}, {pipeline} pipeline ranks"
        + (f", {per_stage} layers per interleaved stage" if per_stage is not None else "")
        + (f", {stages // pipeline} interleaved stages each" if stages > pipeline else ""),
        allowed=f"a number of layers that is a multiple of {unit}, such as {max(1, counted // unit) * unit}",
        fix="--pipeline-model-parallel-size, --num-layers-per-virtual-pipeline-stage or "
        "--num-virtual-stages-per-pipeline-rank",
    )


def _layers(cfg: RunConfig) -> str:
    t = cfg.transformer
    extra = (" + the embedding" if t.account_for_embedding_in_pipeline_split else "") + (
        " + the loss" if t.account_for_loss_in_pipeline_split else ""
    )
    return f"{t.num_layers} layers{extra}"


def _uneven_stages(cfg: RunConfig) -> Iterator[ConfigError]:
    """Layers of the first and last rank given apart; the others share the rest equally."""
    t = cfg.transformer
    ends = [t.num_layers_in_first_pipeline_stage, t.num_layers_in_last_pipeline_stage]
    given = [layers for layers in ends if layers is not None]
    fix = "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
    if cfg.distributed.num_layers_per_virtual_pipeline_stage is not None:
        yield ConfigError(
            "layers per interleaved stage cannot be given when the first or last rank has its own number of layers",
            fix="use --num-virtual-stages-per-pipeline-rank",
        )
    if t.account_for_embedding_in_pipeline_split or t.account_for_loss_in_pipeline_split:
        yield ConfigError(
            "neither embedding nor loss can count as a layer when the first or last rank has its own number of layers",
            fix=f"leave out {fix}",
        )
    virtual = t.virtual_pipeline_model_parallel_size or 1
    rest, ranks = t.num_layers - sum(given), t.pipeline_model_parallel_size - len(given)
    fits = rest == 0 if ranks == 0 else ranks > 0 and rest > 0 and rest % (ranks * virtual) == 0
    if not fits or any(layers < 1 or layers % virtual for layers in given):
        yield ConfigError(
            "the layers that the first and last rank leave cannot be shared equally by the other ranks",
            got=f"{t.num_layers} layers, {' and '.join(map(str, given))} of them set apart, "
            f"{max(ranks, 0)} other ranks, {virtual} interleaved stages each",
            fix=fix,
        )


def interleaving_has_stages_and_microbatches(cfg: RunConfig) -> Iterator[ConfigError]:
    """Interleaved stages need several pipeline ranks, and micro-batches in groups of as many as there are ranks."""
    t, d = cfg.transformer, cfg.distributed
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        value = getattr(d, name)
        if value is not None and value < 1:
            yield ConfigError(f"--{name.replace('_', '-')} counts from 1", got=value)
    if t.virtual_pipeline_model_parallel_size is None:
        return
    pipeline = t.pipeline_model_parallel_size
    if pipeline < 2:
        yield ConfigError(
            "interleaved stages need a pipeline",
            got=f"--pipeline-model-parallel-size {pipeline}",
            allowed="2 or more",
            fix="--pipeline-model-parallel-size, or leave out the interleaved stages",
        )
        return
    group = t.microbatch_group_size_per_vp_stage or pipeline
    unit = samples_per_pass(cfg)
    for size in global_batch_sizes(cfg):
        micro_batches = size // unit
        remainder = micro_batches % group
        if not pipeline <= group <= micro_batches or 0 < remainder < pipeline:
            yield ConfigError(
                "interleaved stages take micro-batches in groups of at least as many as there are pipeline ranks",
                got=f"{micro_batches} micro-batches (global batch {size} / {unit} samples per pass) "
                f"in groups of {group}, {pipeline} pipeline ranks",
                allowed=f"a multiple of {group} micro-batches",
                fix=f"--global-batch-size, for example {max(1, micro_batches // pipeline) * pipeline * unit}",
            )
            return


def samples_per_pass(cfg: RunConfig) -> int:
    """Sequences of one micro-batch on every data-parallel rank, 0 when either is unknown."""
    return (cfg.training.micro_batch_size or 0) * cfg.distributed.data_parallel_size


def global_batch_sizes(cfg: RunConfig) -> list[int]:
    """Every global batch size of the run that is a whole number of passes, in the order of a ramp-up."""
    final, unit = cfg.training.global_batch_size, samples_per_pass(cfg)
    if not final or final < 1 or unit < 1:
        return []
    ramp = cfg.training.rampup_batch_size
    sizes = range(ramp[0], final, ramp[1]) if ramp and min(ramp[:2]) > 0 else range(0)
    return [size for size in (*sizes, final) if size % unit == 0]


def batch_is_whole_passes(cfg: RunConfig) -> Iterator[ConfigError]:
    """The global batch, at each step of a ramp-up, is a whole number of micro-batches on every data-parallel rank."""
    final, unit, ramp = cfg.training.global_batch_size, samples_per_pass(cfg), cfg.training.rampup_batch_size
    if final is None or final < 1 or unit < 1:
        return
    fix = "--global-batch-size or --micro-batch-size"
    parts = f"micro-batch {cfg.training.micro_batch_size} x {cfg.distributed.data_parallel_size} data-parallel ranks"
    if final % unit:
        near = max(1, final // unit) * unit
        yield ConfigError(
            "the global batch is no whole number of micro-batches on every rank",
            got=f"--global-batch-size {final}, {parts} = {unit}",
            allowed=f"a multiple of {unit}, such as {near}",
            fix=fix,
        )
    if not ramp:
        return
    start, increment, samples = ramp
    if start < 1 or increment < 1 or samples < 0 or start > final or (final - start) % increment:
        yield ConfigError(
            "the batch ramp-up does not end at the global batch",
            got=f"start {start}, increment {increment}, {samples} samples, --global-batch-size {final}",
            allowed="a start and an increment above 0 that reach it in whole steps",
            fix="--rampup-batch-size or --global-batch-size",
        )
    elif start % unit or increment % unit:
        yield ConfigError(
            "the batch ramp-up has sizes that are no whole number of micro-batches on every rank",
            got=f"start {start}, increment {increment}, {parts} = {unit}",
            allowed=f"multiples of {unit}",
            fix="--rampup-batch-size or --micro-batch-size",
        )


def heads_fill_the_ranks(cfg: RunConfig) -> Iterator[ConfigError]:
    """Every tensor-parallel rank gets the same heads and feed-forward rows; key-value heads may be copied."""
    t = cfg.transformer
    tensor, heads, groups = t.tensor_model_parallel_size, t.num_attention_heads, t.num_query_groups
    if tensor < 1 or heads < 1:
        return
    fix = "--tensor-model-parallel-size"
    if heads % tensor:
        yield ConfigError(
            "the attention heads cannot be shared equally by the tensor-parallel ranks",
            got=f"{heads} heads, {tensor} ranks",
            allowed=f"a divisor of {heads}",
            fix=fix,
        )
    if groups is not None and groups > 0:
        if heads % groups:
            yield ConfigError(
                "the query heads cannot be shared equally by the key-value groups",
                got=f"{heads} heads, {groups} groups",
                allowed=f"a divisor of {heads}",
                fix="--num-query-groups",
            )
        if heads % tensor == 0 and groups % tensor and tensor % groups:
            yield ConfigError(
                "the key-value groups can be neither shared equally by the tensor-parallel ranks nor copied equally",
                got=f"{groups} groups, {tensor} ranks",
                allowed=f"a multiple or a divisor of {groups}",
                fix=fix,
            )
    if t.kv_channels is None:
        yield ConfigError(
            "the hidden size is no multiple of the number of heads",
            got=f"{t.hidden_size} and {heads}",
            fix="--hidden-size, --num-attention-heads, or say --kv-channels",
        )
    if t.ffn_hidden_size is not None and t.ffn_hidden_size % tensor:
        yield ConfigError(
            "the feed-forward size cannot be shared equally by the tensor-parallel ranks",
            got=f"{t.ffn_hidden_size} and {tensor} ranks",
            fix=f"--ffn-hidden-size or {fix}",
        )


def sequence_fills_the_ranks(cfg: RunConfig) -> Iterator[ConfigError]:
    """With sequence parallelism every tensor-parallel rank gets the same number of tokens."""
    t, length = cfg.transformer, cfg.training.seq_length
    unit = t.tensor_model_parallel_size
    if t.sequence_parallel and length is not None and unit > 1 and length % unit:
        yield ConfigError(
            "the sequence cannot be shared equally by the tensor-parallel ranks",
            got=f"--seq-length {length}, {unit} ranks with --sequence-parallel",
            allowed=f"a multiple of {unit}, such as {max(1, length // unit) * unit}",
            fix="--seq-length, or leave out --sequence-parallel",
        )


def vocabulary_fits(cfg: RunConfig) -> Iterator[ConfigError]:
    """The embedding table holds every token and is shared equally by the tensor-parallel ranks."""
    padded, tokens, tensor = (
        cfg.model.padded_vocab_size,
        cfg.model.vocab_size,
        cfg.transformer.tensor_model_parallel_size,
    )
    if padded is None or tensor < 1:
        return
    if tokens is not None and padded < tokens:
        yield ConfigError(
            "the embedding table has fewer rows than there are tokens",
            got=f"--padded-vocab-size {padded}, vocabulary {tokens}",
            allowed=f"{tokens} or more",
            fix="--padded-vocab-size",
        )
    if padded % tensor:
        yield ConfigError(
            "the embedding table cannot be shared equally by the tensor-parallel ranks",
            got=f"--padded-vocab-size {padded}, {tensor} ranks",
            allowed=f"a multiple of {tensor}",
            fix="--padded-vocab-size, or leave it out and say --make-vocab-size-divisible-by",
        )


def planned_parallelism_is_off(cfg: RunConfig) -> Iterator[ConfigError]:
    """Context parallelism and others are still to come; recipes carry their sizes as 1."""
    t, instances = cfg.transformer, cfg.ddp.num_distributed_optimizer_instances
    for name, size, what in (
        ("--context-parallel-size", t.context_parallel_size, "context parallelism"),
        ("--num-distributed-optimizer-instances", instances, "the distributed features"),
    ):
        if size not in (None, 1):
            yield ConfigError(f"{name} is planned with {what}", got=size, allowed=1, fix=name)


def overlap_has_what_it_needs(cfg: RunConfig) -> Iterator[ConfigError]:
    """Overlapped gathering of parameters needs the distributed optimizer and overlapped gradient reduction."""
    o, t = cfg.optimizer, cfg.transformer
    if o.overlap_param_gather and not o.use_distributed_optimizer:
        yield ConfigError(
            "--overlap-param-gather gathers what the distributed optimizer updates",
            fix="add --use-distributed-optimizer",
        )
    if o.overlap_param_gather and not cfg.ddp.overlap_grad_reduce:
        yield ConfigError("--overlap-param-gather needs overlapped gradients", fix="add --overlap-grad-reduce")
    if o.optimizer != "adam" and o.use_distributed_optimizer:
        yield ConfigError(
            "the distributed optimizer of megatron-core 0.16.1 works with adam alone",
            got=f"--optimizer {o.optimizer}",
            allowed="adam",
            fix="leave out --use-distributed-optimizer",
        )
    if t.overlap_p2p_comm_warmup_flush and not t.overlap_p2p_comm:
        yield ConfigError(
            "overlapped messages in warm-up and flush need overlapped messages between interleaved stages",
            fix="add --overlap-p2p-communication and interleaved stages",
        )


LAYOUT_RULES = (
    processes_fill_the_model,
    layers_fill_the_stages,
    interleaving_has_stages_and_microbatches,
    batch_is_whole_passes,
    heads_fill_the_ranks,
    sequence_fills_the_ranks,
    vocabulary_fits,
    planned_parallelism_is_off,
    overlap_has_what_it_needs,
)
