"""What the ranks run to show that the patches, dropout, the split loss and saved runs do what they are for."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

import mindspeed_llm.core  # noqa: F401  brings megatron-core in behind its seam
from mindspeed_llm import api
from mindspeed_llm.checkpoint import hf_io
from mindspeed_llm.config.resolve import from_values
from mindspeed_llm.config.run import RunConfig
from mindspeed_llm.core import patches
from mindspeed_llm.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mindspeed_llm.core.transformer import attention
from mindspeed_llm.errors import CheckpointError
from mindspeed_llm.models.registry import family_for
from mindspeed_llm.patching import applied_patches, apply
from mindspeed_llm.training.initialize import initialize
from mindspeed_llm.training.objective import pretraining
from mindspeed_llm.training.save_load import Saver, load_checkpoint
from mindspeed_llm.training.setup import setup
from mindspeed_llm.training.state import Run
from mindspeed_llm.training.step import train_step
from tests.parity.case import micro_batches
from tests.parity.layouts import RECIPE, parse_layout

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import exchange_utils
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import token_dispatcher

# ---------------------------------------------------------------------------------------------------------- primitives


def reduce_non_contiguous() -> tuple[torch.Tensor, torch.Tensor]:
    """What ``_reduce`` returns for a transposed tensor, and the sum over ranks."""
    whole = torch.arange(6.0).reshape(2, 3)
    got = mappings._reduce((whole * (dist.get_rank() + 1)).t(), dist.group.WORLD)
    return got.clone(), whole.t() * sum(range(1, dist.get_world_size() + 1))


def send_then_swap(function: str, transfer: bool = True) -> dict[str, Any]:
    """Rank 0 sends 8 MiB and swaps the tensor's data before rank 1 asks for it.

    Args:
        transfer: rank 1 receives. Without it rank 0 only says whether what it sent still exists.
    """
    rank = dist.get_rank()
    send = getattr(p2p_communication, function)
    values = torch.arange(2.0 * 2**20)
    nothing = {"tensor_send_prev": None, "tensor_recv_prev": None, "tensor_send_next": None, "tensor_recv_next": None}
    group = dist.group.WORLD
    others = {"group": group, "prev_pipeline_rank": 1 - rank, "next_pipeline_rank": 1 - rank}
    found: dict[str, Any] = {}
    if rank == 0:
        sent = values.clone()
        held = StorageWeakRef(sent.untyped_storage())
        requests = send(**{**nothing, "tensor_send_next": sent}, **others)
        sent.data = torch.empty(1)
        found["gone"] = held.expired()
        dist.barrier()
        if transfer:
            wait(requests)
    else:
        # Only once rank 0 has swapped.
        dist.barrier()
        if transfer:
            received = torch.zeros_like(values)
            wait(send(**{**nothing, "tensor_recv_prev": received}, **others))
            found["intact"] = torch.equal(received, values)
    return found


def exchange() -> bool:
    """Whether a tensor that another rank needs, too, comes out of the exchange of a parallel load."""
    loaded = torch.arange(3.0)
    shard: Any = ("weight", (0,), None)
    who = exchange_utils.ShardDistribution({shard: 0}, {shard}, {}, {shard: [0, 0]})
    found = exchange_utils.exchange_loaded_tensors_broadcast({shard: loaded}, {}, who, dist.group.WORLD)
    return torch.equal(found[shard], loaded)


def uneven_gather() -> bool:
    """Whether parts of one row on rank 0, two rows on rank 1 and so on come together, in order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = torch.full((rank + 1, 2), float(rank))
    found = mappings._gather_along_first_dim(part, dist.group.WORLD, list(range(1, ranks + 1)))
    return torch.equal(found, torch.cat([torch.full((other + 1, 2), float(other)) for other in range(ranks)]))


def sizes_on_the_host() -> bool:
    """Whether the sizes of all-to-all messages are numbers that torch.distributed takes."""
    return isinstance(token_dispatcher.maybe_move_tensor_to_cpu(torch.arange(3), as_numpy=True), np.ndarray)


def wait(requests: Any) -> None:
    for request in requests.values() if isinstance(requests, dict) else requests:
        request.wait()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor, vocab: int) -> dict[str, Any]:
    """Loss of this rank's columns of the padded ``logits``, and the gradient of these columns."""
    part = logits.chunk(dist.get_world_size(), -1)[dist.get_rank()].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(part, labels, vocab, dist.group.WORLD)
    (gradient,) = torch.autograd.grad(loss, part, weight)
    return {"loss": loss.detach(), "gradient": gradient}


# ---------------------------------------------------------------------------------------------------------------- runs


def recipe(layout: str, tokens: torch.Tensor, **more: Any) -> dict[str, Any]:
    """Values of a run over ``tokens [steps, batch, s + 1]``."""
    return {
        **RECIPE,
        "seq_length": tokens.shape[2] - 1,
        "micro_batch_size": 1,
        "global_batch_size": tokens.shape[1],
        "train_iters": tokens.shape[0],
        "make_vocab_size_divisible_by": 1,
        **parse_layout(layout)[1],
        **more,
    }


def configuration(folder: str, values: dict[str, Any]) -> RunConfig:
    hf_config = hf_io.read_config(folder)
    return from_values(
        {**family_for(hf_config).config_to_values(hf_config), **values}, world_size=dist.get_world_size()
    )


def logits_of_lengths(folder: str, tokens: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """``[b, length, v]`` of the first ``length`` of ``tokens [b, s]``, one after the other in one model."""
    # A configured length beyond the trained one is refused; only the dynamic scheme is made for that.
    run = api.load_hf(folder, **recipe("one", tokens[None, :, :], seq_length=16))
    found = []
    for length in lengths:
        part = tokens[:, :length]
        with torch.no_grad():
            found.append(run.chunks[0].eval()(part, torch.arange(length).expand_as(part), None))
    return found


def dropout_masks(folder: str, layout: str, tokens: torch.Tensor, **more: Any) -> dict[str, list[torch.Tensor]]:
    """Which elements the first micro-batch's forward pass drops, in order: of hidden states and of attention."""
    masks: dict[str, list[torch.Tensor]] = {"hidden": [], "attention": []}
    values = recipe(layout, tokens, hidden_dropout=0.1, attention_dropout=0.1, **more)
    run = api.load_hf(folder, **values)
    batch = next(micro_batches(tokens, 1))
    with recorded(masks):
        run.chunks[0](batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return masks


@contextmanager
def recorded(masks: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Keep what dropout drops while the block runs."""
    dropout, draw = F.dropout, attention._draw_keeps

    def hidden(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = dropout(x, *args, **kwargs)
        masks["hidden"].append((out == 0) & (x != 0))
        return out

    def scores(*args: Any) -> list[torch.Tensor]:
        keeps = draw(*args)
        masks["attention"].append(~keeps[0])
        return keeps

    F.dropout, attention._draw_keeps = hidden, scores
    try:
        yield
    finally:
        F.dropout, attention._draw_keeps = dropout, draw


def train_some(
    folder: str,
    layout: str,
    tokens: torch.Tensor,
    *,
    first: int = 0,
    load: str | None = None,
    saves: dict[int, list[tuple[str, bool]]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Train on ``tokens`` from step ``first`` on.

    Args:
        load: a folder with a save of step ``first``; the weights start as random ones that are not the folder's.
        saves: step -> (folder, portable) of each save after it.
    """
    values = recipe(layout, tokens, **more)
    if load is None:
        run = api.load_hf(folder, **values)
    else:
        # Another seed, so that what is equal afterwards came out of the save.
        cfg = configuration(folder, {**values, "seed": 4321})
        initialize(cfg)
        run = setup(cfg)
        load_checkpoint(run, Path(load), first)
    found: dict[str, Any] = {"losses": [], "norms": [], "rates": [], "start": vars(run.progress).copy()}
    batches = [micro_batches(tokens[first:], values["micro_batch_size"]) for _ in run.chunks]
    for step in range(first + 1, tokens.shape[0] + 1):
        result = train_step(run, pretraining, batches)
        run.progress.iteration += 1
        run.progress.consumed_samples += tokens.shape[1]
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        found["rates"].append(result.learning_rate)
        for target, portable in (saves or {}).get(step, []):
            save(run, target, portable)
    return found | {"weights": weights(run), "children": len(multiprocessing.active_children())}


def save(run: Run, folder: str, portable: bool) -> None:
    """Save to ``folder``, whatever the configuration says."""
    cfg = run.cfg
    run.cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, save=folder, dist_ckpt_optim_fully_reshardable=portable))
    Saver(run).save()
    run.cfg = cfg


def weights(run: Run) -> dict[str, torch.Tensor]:
    """This rank's parameters after the last update."""
    run.gather_parameters()
    return {
        f"{index}.{name}": parameter.detach().clone()
        for index, chunk in enumerate(run.chunks)
        for name, parameter in chunk.named_parameters()
    }


def refused_load(folder: str, layout: str, tokens: torch.Tensor, load: str, step: int, **more: Any) -> str:
    """The error of a load that must not go through."""
    try:
        train_some(folder, layout, tokens, first=step, load=load, **more)
    except CheckpointError as error:
        return str(error)
    return "it loaded"


def loaded_weights(folder: str, layout: str, tokens: torch.Tensor, load: str, step: int, **more: Any) -> dict[str, Any]:
    """What a load leaves, before any step."""
    cfg = configuration(folder, recipe(layout, tokens, seed=4321, **more))
    initialize(cfg)
    run = setup(cfg)
    load_checkpoint(run, Path(load), step)
    return {"progress": vars(run.progress).copy(), "weights": weights(run), "rate": run.scheduler.num_steps}


def build(folder: str, layout: str, tokens: torch.Tensor, **more: Any) -> dict[str, Any]:
    """One step of a run."""
    return train_some(folder, layout, tokens[:1], **more)


def save_and_resume(
    folder: str, layout: str, tokens: torch.Tensor, root: str, portable: bool = True, **more: Any
) -> dict[str, Any]:
    """A straight run, and in the same processes one that takes up its save after half of it."""
    half = tokens.shape[0] // 2
    straight = train_some(folder, layout, tokens, saves={half: [(root, portable)]}, **more)
    parallel_state.destroy_model_parallel()
    resumed = train_some(folder, layout, tokens, first=half, load=root, **more)
    same = all(torch.equal(straight["weights"][name], value) for name, value in resumed["weights"].items())
    return {
        "same": same and straight["losses"][half:] == resumed["losses"],
        "children": straight["children"] + resumed["children"],
    }


# ------------------------------------------------------------------------------------------------ without one patch


def without(patch: str | None, case: str, **arguments: Any) -> Any:
    """The result of a case of this file, or the error that it ends in, with all patches of a run but ``patch``'s."""
    in_force = applied_patches()
    patches.revert()
    some = apply([each for each in in_force if each.target != patch])
    try:
        return globals()[case](**arguments)
    # Whatever megatron-core raises then is the result.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()
        some.revert()
        # The very same patches, or the pool takes them for new ones.
        patches._applied = apply(in_force)
