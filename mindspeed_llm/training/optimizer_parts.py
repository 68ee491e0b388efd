"""The optimizer's state of a save whose run had another number of optimizers.

megatron-core gives experts an optimizer of their own where they have fewer replicas than the rest. The tensors of a
save do not say which optimizer kept them; its groups of parameters and counters do.
"""

# pyright: basic
# megatron-core's optimizers and their states have no types.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

State = Mapping[Any, Any]


def fitted(loaded: State, stored: State, optimizer: Any) -> State:
    """``loaded`` as the optimizers of this run take it.

    Args:
        loaded: what was read by the layout of this run: tensors by its optimizers, the rest by those of the save.
        stored: the part of the save's state that is no tensor: of one optimizer, or of each by its number.
        optimizer: megatron-core's, of one part or several.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    theirs = [stored[number] for number in sorted(stored)] if 0 in stored else [stored]
    if len(theirs) == len(parts):
        return loaded
    own = [loaded[number] for number in range(len(parts))] if len(parts) > 1 else [_without_numbers(loaded)]
    groups = {_kind(group): group for one in reversed(theirs) for group in _holder(one)["param_groups"]}
    made = []
    for part, tensors in zip(parts, own, strict=True):
        state = _merged(theirs[0], tensors)
        live = part.optimizer.state_dict()["param_groups"]
        _holder(state)["param_groups"] = [
            {**groups[_kind(group)], "is_expert_parallel": group["is_expert_parallel"], "params": group["params"]}
            for group in live
        ]
        made.append(state)
    return dict(enumerate(made)) if len(made) > 1 else made[0]


def _without_numbers(state: State) -> State:
    return {name: value for name, value in state.items() if not isinstance(name, int)}


def _holder(state: State) -> Any:
    """Where the groups of parameters stand: an optimizer with fp32 copies or shards keeps torch's beside them."""
    return state.get("optimizer", state)


def _kind(group: State) -> tuple[Any, ...]:
    """What tells groups of parameters apart, but for whose parameters they are."""
    return tuple(group[name] for name in ("wd_mult", "lr_mult", "is_decoupled_lr"))


def _merged(first: State, second: State) -> dict[Any, Any]:
    """Both, down to dicts of their own."""
    found = {name: _merged(value, {}) if isinstance(value, Mapping) else value for name, value in first.items()}
    for name, value in second.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = _merged(found[name], value) if both else value
    return found
