"""AdamW as the fused optimizers of apex and Transformer Engine lay it out, for where neither is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GroupStepAdamW(torch.optim.Optimizer):
    """Adam with the step count in the parameter group and only ``exp_avg`` and ``exp_avg_sq`` per parameter.

    ``torch.optim.AdamW`` keeps a step *tensor* per parameter. Under Megatron-Core's distributed optimizer a restored
    run then either shares one step tensor among all parameters, so that it advances once per parameter, or starts
    again at step 0: both silently. The fused optimizers keep one integer in the group; so does this.

    The update is that of Loshchilov and Hutter (decoupled weight decay, arXiv:1711.05101) or, with
    ``adam_w_mode=False``, of Kingma and Ba with L2 regularisation (arXiv:1412.6980).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        """``capturable`` belongs to CUDA graphs and must be False."""
        if capturable:
            raise ValueError("capturable=True needs CUDA graphs")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        beta1, beta2 = group["betas"]
        lr, decay, step = float(group["lr"]), float(group["weight_decay"]), int(group["step"])
        grads = [p.grad for p in params if p.grad is not None]
        means = [self.state[p]["exp_avg"] for p in params]
        squares = [self.state[p]["exp_avg_sq"] for p in params]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, means, denominators, -lr / (1 - beta1**step))


def install_group_step_adam() -> None:
    """Has Megatron-Core use ``GroupStepAdamW`` where it would fall back to ``torch.optim.AdamW``.

    It then treats it as it treats apex's. Nothing changes where Transformer Engine or apex is installed.
    """
    import megatron.core.optimizer as megatron_optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed_optimizer

    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.Adam = GroupStepAdamW
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed_optimizer.Adam = GroupStepAdamW
    distributed_optimizer.HAVE_APEX_OR_TE = True
    distributed_optimizer.USING_APEX_OPTIMIZER = True
