"""Which layers of a model are of which kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layers_of_experts(values: Mapping[str, Any]) -> list[bool]:
    """Of each layer, whether its MLP is a mixture of experts, by ``--moe-layer-freq``.

    N puts experts into every Nth layer, the first included; a sequence says 1 or 0 for each layer.

    Args:
        values: ``num_layers``, and of a mixture ``num_moe_experts`` and ``moe_layer_freq``.
    """
    if not values.get("num_moe_experts"):
        return [False] * values["num_layers"]
    frequency = values["moe_layer_freq"]
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(values["num_layers"])]
    return [bool(one) for one in frequency]
