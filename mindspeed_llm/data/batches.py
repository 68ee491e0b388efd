"""From datasets to the batch of one micro-step: loading, sharing in the tensor-parallel group, document boundaries."""

# megatron-core is untyped, and most here is its objects.
# pyright: basic

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import mindspeed_llm.core  # noqa: F401 - the device seam comes before megatron.core
from mindspeed_llm import device
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.data.datasets import stage_needs_batch
from mindspeed_llm.data.sampler import DataParallelCut, SequentialSampler, ShuffledSampler
from mindspeed_llm.errors import DataError

from megatron.core import parallel_state

Sample = Mapping[str, torch.Tensor]
Batch = dict[str, torch.Tensor | None]

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
_OK, _EXHAUSTED = 1, 0


def data_parallel_cut(cfg: RunConfig) -> DataParallelCut:
    """How samples are dealt to this rank of an initialised run."""
    if cfg.training.micro_batch_size is None:
        raise DataError("The size of a micro-batch is not given.", fix="--micro-batch-size")
    return DataParallelCut(
        cfg.training.micro_batch_size,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )


def build_data_iterator(
    dataset: Dataset[Sample] | None,
    cfg: RunConfig,
    consumed_samples: int,
    cut: DataParallelCut | None = None,
) -> Iterator[Sample] | None:
    """Read a dataset in micro-batches, from where a run stopped.

    Opening takes the same time at any ``consumed_samples``: nothing before it is read.

    Args:
        dataset: from ``build_datasets``; None gives None (this rank reads no samples).
        cfg: the run.
        consumed_samples: samples that all ranks together have seen already.
        cut: how samples are dealt out; by default as the initialised run has it.

    Returns:
        An iterator of dicts of CPU tensors ``[b, s]``.

    Raises:
        DataError: when no samples are left.
    """
    if dataset is None:
        return None
    sampler = _sampler(dataset, cfg, consumed_samples, cut)
    workers = cfg.data.num_workers
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.current().type == "cuda",
        # Without one of its own it draws from the default generator, here and not on the ranks that read no data: these
        # would then drop other elements of hidden states, and a resumed run others than an uninterrupted one.
        generator=torch.Generator(),
        worker_init_fn=_outlive_sigterm,
    )
    return iter(loader)


def _sampler(
    dataset: Dataset[Sample], cfg: RunConfig, consumed_samples: int, cut: DataParallelCut | None
) -> SequentialSampler | ShuffledSampler:
    kind = ShuffledSampler if cfg.data.dataloader_type == "cyclic" else SequentialSampler
    return kind(len(dataset), consumed_samples, cut or data_parallel_cut(cfg))  # pyright: ignore[reportArgumentType]


def sample_numbers(
    dataset: Dataset[Sample] | None, cfg: RunConfig, consumed_samples: int, micro_batches: int
) -> list[list[int]]:
    """Numbers, in the dataset, of the samples that this rank reads from ``consumed_samples`` on.

    Args:
        dataset: as in :func:`build_data_iterator`.
        cfg: the run.
        consumed_samples: samples that all ranks together have seen before.
        micro_batches: how many to look at.

    Returns:
        A list for each micro-batch; none without a dataset.
    """
    if dataset is None:
        return []
    return list(itertools.islice(_sampler(dataset, cfg, consumed_samples, None), micro_batches))


def _outlive_sigterm(_worker: int) -> None:
    """A scheduler's SIGTERM reaches the whole process group; the run needs its data until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def get_batch(
    iterator: Iterator[Sample] | None,
    cfg: RunConfig,
    *,
    eod: int,
    vp_stage: int | None = None,
) -> Batch:
    """The next micro-batch, on the device, equal on all ranks of the tensor-parallel group.

    One broadcast of one buffer. All ranks of the group must call this together.

    Args:
        iterator: from :func:`build_data_iterator`; used on tensor-parallel rank 0 only.
        cfg: the run.
        eod: the end-of-document id of the tokenizer.
        vp_stage: the model chunk, where a rank has several.

    Returns:
        ``tokens``, ``labels``, ``position_ids``: int64 ``[b, s]``; ``loss_mask``: float32 ``[b, s]``;
        ``attention_mask``: None (causal), or bool ``[b, 1, s, s]``, true where attention is forbidden;
        ``cu_seqlens``: None, or int32 ``[n + 1]``, where documents begin among the ``b * s`` tokens of the batch laid
        end to end, and ``b * s``. The last two are set with ``--reset-attention-mask``; with
        ``--no-create-attention-mask-in-dataloader`` and a micro-batch of one sequence only the second, from which
        attention then works (megatron-core packs documents of one sequence alone). All are None on a stage that uses
        no batch.

    Raises:
        DataError: when the data is used up; on every rank of the group.
    """
    if not stage_needs_batch(cfg, vp_stage):
        return dict.fromkeys((*_FIELDS, "attention_mask", "cu_seqlens"))
    shape = (cfg.training.micro_batch_size or 0, cfg.training.seq_length or 0)
    fields = _share(_next_packed(iterator, shape, cfg.model.vocab_size or 0), shape)
    batch: Batch = {**fields, "attention_mask": None, "cu_seqlens": None}
    if cfg.data.reset_attention_mask:
        tokens = fields["tokens"]
        batch["cu_seqlens"] = document_boundaries(tokens, eod)
        if cfg.data.create_attention_mask_in_dataloader or tokens.shape[0] > 1:
            batch["attention_mask"] = document_mask(tokens, eod)
    return batch


def document_boundaries(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Where documents begin when the rows of a batch are laid end to end.

    A row begins a document, and so does the token after each end of document.

    Args:
        tokens: ``[b, s]``.
        eod: the end-of-document id, the last token of its document.

    Returns:
        int32 ``[n + 1]``, ascending from 0, the last one ``b * s``: ``cu_seqlens`` of packed attention.
    """
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten()
    end = torch.tensor([tokens.numel()], dtype=starts.dtype, device=starts.device)
    return torch.cat([starts, end]).to(torch.int32)


def document_mask(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """Causal attention within documents.

    Args:
        tokens: ``[b, s]``.
        eod: the end-of-document id, the last token of its document.

    Returns:
        bool ``[b, 1, s, s]``, true where query (third axis) must not see key (fourth axis), as megatron-core has it.
    """
    ends = (tokens == eod).to(torch.int64)
    document = ends.cumsum(dim=1) - ends
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    future = positions[None, :] > positions[:, None]
    return ((document[:, :, None] != document[:, None, :]) | future)[:, None]


def _next_packed(iterator: Iterator[Sample] | None, shape: tuple[int, int], vocab_size: int) -> torch.Tensor:
    """The next micro-batch of tensor-parallel rank 0 as int64 ``[1 + 4 b s]``: its state, then its fields.

    The state is 1, or 0 where there is none, or minus its highest id where the model has no row for that.

    Other ranks get room for it. On rank 0 the buffer is still in the CPU's memory.
    """
    size = 1 + len(_FIELDS) * shape[0] * shape[1]
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return torch.empty(size, dtype=torch.int64, device=device.current().torch_device)
    if iterator is None:
        raise RuntimeError("tensor-parallel rank 0 of a stage that uses batches was given no iterator")
    sample = next(iterator, None)
    if sample is None:
        return torch.full((size,), _EXHAUSTED, dtype=torch.int64)
    highest = max(int(sample[name].max()) for name in ("tokens", "labels"))
    state = _OK if highest < vocab_size else -highest
    return torch.cat([torch.tensor([state]), *(_to_int64(sample[name]).reshape(-1) for name in _FIELDS)])


def _share(packed: torch.Tensor, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Send the buffer of tensor-parallel rank 0 to its group and take it apart."""
    shared = packed.to(device.current().torch_device)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        group: Any = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.broadcast(shared, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
    # Reading a value back from an accelerator would stall its queue in every micro-step: there, rank 0 alone knows,
    # and its exit ends the others.
    state = int(packed[0]) if packed.device.type == "cpu" else _OK
    if state == _EXHAUSTED:
        raise DataError("The data is used up before training ended.", fix="more data, or fewer iterations")
    if state < 0:
        raise DataError(
            "The data holds an id for which the model's vocabulary has no row.",
            got=f"id {-state}",
            fix="the tokenizer of this model, or a larger --vocab-size for a model trained from scratch",
        )
    fields: dict[str, torch.Tensor] = dict(zip(_FIELDS, shared[1:].view(len(_FIELDS), *shape).unbind(), strict=True))
    fields["loss_mask"] = fields["loss_mask"].to(torch.int32).view(torch.float32)
    return fields


def _to_int64(values: torch.Tensor) -> torch.Tensor:
    """Integers as they are, float32 by their bits, so that any loss weight arrives unchanged."""
    return values.view(torch.int32).to(torch.int64) if values.is_floating_point() else values
