"""Adam with the step count in the parameter group, over the flat shards that megatron-core hands to it.

Apex's and TransformerEngine's FusedAdam have these semantics and megatron-core's distributed optimizer is written for
them: an integer ``step`` per group, ``exp_avg`` and ``exp_avg_sq`` per parameter. torch's AdamW keeps a ``step`` tensor
per parameter, which the distributed optimizer replaces by one tensor shared between all of them on a load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class Adam(torch.optim.Optimizer):
    """Adam [Kingma and Ba 2015], or AdamW [Loshchilov and Hutter 2019] with ``adam_w_mode``.

    Args:
        params: parameters or groups of them; each group may override the other arguments.
        lr: learning rate.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the root of the second mean.
        weight_decay: decoupled from the gradient with ``adam_w_mode``, else added to it.
        adam_w_mode: AdamW rather than Adam with L2 regularisation.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Raises:
            TypeError: ``closure`` is given; megatron-core never does.
        """
        if closure is not None:
            raise TypeError("Adam.step takes no closure")
        fused = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            # The kernel takes one step tensor per parameter and only reads it.
            steps = [torch.tensor(float(group["step"]), device=params[0].device)] * len(params)
            fused(
                params,
                [param.grad for param in params],
                self._means(params, "exp_avg"),
                self._means(params, "exp_avg_sq"),
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _means(self, params: Iterable[torch.Tensor], name: str) -> list[torch.Tensor]:
        found = []
        for param in params:
            state = self.state[param]
            if name not in state:
                state[name] = torch.zeros_like(param)
            found.append(state[name])
        return found
