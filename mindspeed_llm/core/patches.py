"""The patches of megatron-core that every run needs, whatever its features.

Each says why nothing gentler would do and when it can go; ``mindspeed_llm.patching`` applies them and checks that their
targets are those of 0.16.1.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_llm.core.optimizer.adam import Adam
from mindspeed_llm.device import current
from mindspeed_llm.patching import AppliedPatches, Patch, apply

_OPTIMIZER = "megatron.core.optimizer"
_DISTRIBUTED = f"{_OPTIMIZER}.distrib_optimizer"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"


def _tensor_type_sites() -> list[Patch]:
    """Functions that compare ``Tensor.type()`` with CUDA's spelling."""
    prefix = current().tensor_type_prefix
    constants = {f"torch.cuda.{name}Tensor": f"{prefix}{name}Tensor" for name in ("Float", "Half", "BFloat16")}
    sites = (
        f"{_OPTIMIZER}.optimizer:Float16OptimizerWithFloat16Params.__init__",
        f"{_DISTRIBUTED}:DistributedOptimizer._build_model_and_main_param_groups",
        f"{_OPTIMIZER}.clip_grads:clip_grad_by_total_norm_fp32",
    )
    return [
        Patch(
            target=target,
            kind="recode",
            constants=constants,
            why="compares Tensor.type() with the CUDA name as a literal",
            remove_when="megatron-core compares dtypes",
        )
        for target in sites
    ]


def _load_scaler(self: Any, state_dict: dict[str, Any]) -> None:
    self._scale = state_dict["scale"].to(current().torch_device)
    self._growth_tracker = state_dict["growth_tracker"]
    self._hysteresis_tracker = state_dict["hysteresis_tracker"]


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Waits for the device, unlike megatron-core's copy on a stream of its own."""
    if not torch.is_tensor(tensor):
        return tensor
    return tensor.cpu().numpy() if as_numpy else tensor.cpu()


def _contiguous_first(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def contiguous_reduce(input_: torch.Tensor, group: Any) -> torch.Tensor:
        return reduce(input_.contiguous(), group)

    return contiguous_reduce


def _uneven_gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def gather_parts(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        ranks, rows = group.size(), input_.shape[0]
        output = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        whole = input_.repeat(ranks, *[1] * (input_.dim() - 1))
        dist.all_to_all_single(output, whole, output_split_sizes, [rows] * ranks, group=group)
        return output

    return gather_parts


def _alias_what_is_sent(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def send_aliases(*, tensor_send_prev: Any, tensor_send_next: Any, **others: Any) -> Any:
        prev = None if tensor_send_prev is None else tensor_send_prev.detach()
        following = None if tensor_send_next is None else tensor_send_next.detach()
        return send(tensor_send_prev=prev, tensor_send_next=following, **others)

    return send_aliases


def _always() -> list[Patch]:
    adam = "the optimizer class is a module global chosen by which of TransformerEngine and Apex is installed"
    gone = "megatron-core takes the optimizer class as an argument"
    shared_step = (
        "the flags tell DistributedOptimizer that the step count lives in the param group, as this Adam keeps it;"
        " with torch's AdamW it shares one step tensor between all states after a load and is silently wrong"
    )
    flags = {
        f"{_OPTIMIZER}:USING_PYTORCH_OPTIMIZER": False,
        f"{_DISTRIBUTED}:HAVE_APEX_OR_TE": True,
    }
    return [
        *(
            Patch(target=f"{module}:Adam", kind="replace", new=Adam, why=adam, remove_when=gone)
            for module in (_OPTIMIZER, _DISTRIBUTED)
        ),
        *(Patch(target=t, kind="replace", new=value, why=shared_step, remove_when=gone) for t, value in flags.items()),
        Patch(
            target=f"{_DISTRIBUTED}:DistributedOptimizer._set_main_param_and_optimizer_states",
            kind="wrap",
            new=lambda method: torch.no_grad()(method),
            why="copies into fp32 main parameters, which are leaves that require gradients, while loading",
            remove_when="megatron-core loads under no_grad",
        ),
        Patch(
            target="megatron.core.tensor_parallel.mappings:_reduce",
            kind="wrap",
            new=_contiguous_first,
            why="all-reduces a contiguous copy of a non-contiguous tensor and returns the tensor unreduced",
            remove_when="mappings.py reduces what it returns",
        ),
        Patch(
            target="megatron.core.dist_checkpointing.strategies.filesystem_async:_get_write_results_queue",
            kind="replace",
            new=queue.Queue,
            why="spawns a manager process per rank, which re-imports the script, to pass a result inside one process",
            remove_when="a synchronous save uses no process",
        ),
        *(
            Patch(
                target=f"{_P2P}:{name}",
                kind="wrap",
                new=_alias_what_is_sent,
                why="deallocate_pipeline_outputs swaps the data of a tensor that a gloo isend still reads",
                remove_when="isend keeps the storage it was given",
            )
            for name in ("_p2p_ops", "_batched_p2p_ops")
        ),
    ]


def _off_cuda() -> list[Patch]:
    return [
        *_tensor_type_sites(),
        *(
            Patch(
                target=target,
                kind="recode",
                # torch.cpu and torch.npu answer current_device(), the other use of the name there, too.
                names={"cuda": current().type},
                why="moves a tensor with Tensor.cuda()",
                remove_when="megatron-core moves it to the device of the model",
            )
            for target in (
                "megatron.core.models.common.language_module.language_module:"
                "LanguageModule.setup_embeddings_and_output_layer",
                f"{_DISTRIBUTED}:DistributedOptimizer.get_parameter_state_dp_zero",
                "megatron.core.dist_checkpointing.exchange_utils:exchange_loaded_tensors_broadcast",
            )
        ),
        Patch(
            target="megatron.core.tensor_parallel.mappings:_gather_along_first_dim",
            kind="wrap",
            new=_uneven_gather,
            why="gathers parts of different sizes, which gloo refuses",
            remove_when="megatron-core does it with an all-to-all",
        ),
        Patch(
            target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            kind="replace",
            new=_on_host,
            rebind=("megatron.core.transformer.moe.token_dispatcher",),
            why="brings the sizes of all-to-all messages to the host only from CUDA",
            remove_when="megatron-core brings them from any device",
        ),
        Patch(
            target="megatron.core.optimizer.grad_scaler:DynamicGradScaler.load_state_dict",
            kind="replace",
            new=_load_scaler,
            why="moves a tensor with Tensor.cuda(device)",
            remove_when="megatron-core moves it to the device of the model",
        ),
    ]


_applied: AppliedPatches | None = None


def every_run() -> list[Patch]:
    """The patches of this module for the current device."""
    return _always() + (_off_cuda() if current().type != "cuda" else [])


def apply_once() -> None:
    """Apply :func:`every_run`, the first time; for the life of the process."""
    global _applied
    if _applied is None:
        _applied = apply(every_run())


def revert() -> None:
    """Take :func:`apply_once` back, for tools that look at the originals."""
    global _applied
    if _applied is not None:
        _applied.revert()
        _applied = None
