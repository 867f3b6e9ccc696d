"""The weights of a frozen model in the host's memory, on the device only while it runs.

They never change, so that each pass copies them one way: P bytes of weights on this rank, P over the link from the
host (docs/scaling.md gives the times). The copies run beside the model's own work, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_kd.device import SideStream, pinned_exactly


class HostWeights:
    """Holds the weights of a model's shard in one flat buffer for each dtype; their storages on the device are empty.

    P bytes of the host's memory for each rank, pinned where there is CUDA. Buffers that are no parameters stay.
    """

    def __init__(self, model: GPTModel, stay: Sequence[Tensor] = ()) -> None:
        """Moves the weights out.

        Args:
            stay: parameters that are needed outside of the model's passes.

        Raises:
            KDError: so much of the host's memory cannot be pinned.
        """
        kept = {id(parameter) for parameter in stay}
        # A head that was dropped is empty already.
        moved = [p for p in model.parameters() if id(p) not in kept and p.untyped_storage().nbytes()]
        self._side = SideStream()
        self._buffers: list[Tensor] = []
        self._homes = self._move_out(moved)
        layers = list(model.decoder.layers)
        of_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
        # What is outside of layers comes first: the embedding begins, and nobody announces the final norm or the head.
        self._portions: list[tuple[torch.nn.Module, list[Tensor]]] = [
            (model, [parameter for parameter in moved if id(parameter) not in of_layers]),
            *((layer, [p for p in layer.parameters() if id(p) in self._homes]) for layer in layers),
        ]
        self._ready: dict[torch.nn.Module, Callable[[], None]] = {}
        for module, _ in self._portions:
            module.register_forward_pre_hook(self._wait)
        self._release()

    @property
    def bytes(self) -> int:
        """P."""
        return sum(home.nbytes for home in self._homes.values())

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The weights are on the device, or on their way and there before a layer begins; empty again afterwards."""
        self._load()
        try:
            yield
        finally:
            self._release()

    def _load(self) -> None:
        for _, parameters in self._portions:
            for parameter in parameters:
                parameter.untyped_storage().resize_(parameter.nbytes)
        with self._side.copies():
            for module, parameters in self._portions:
                for parameter in parameters:
                    parameter.data.copy_(self._homes[id(parameter)], non_blocking=True)
                self._ready[module] = self._side.mark()

    def _release(self) -> None:
        # A pass that failed may have left copies under way: their memory must not be given to others before.
        for wait in self._ready.values():
            wait()
        self._ready.clear()
        for _, parameters in self._portions:
            for parameter in parameters:
                parameter.untyped_storage().resize_(0)

    def _wait(self, module: torch.nn.Module, _: Any) -> None:
        if module in self._ready:
            self._ready[module]()

    def _move_out(self, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """Of each parameter, by its identity, its values in the host's memory: a view of the buffer of its dtype."""
        homes: dict[int, Tensor] = {}
        for dtype in {parameter.dtype for parameter in parameters}:
            same = [parameter for parameter in parameters if parameter.dtype == dtype]
            buffer, start = pinned_exactly(sum(p.numel() for p in same), dtype), 0
            self._buffers.append(buffer)
            for parameter in same:
                if parameter.untyped_storage().nbytes() != parameter.nbytes:
                    parameter.data = parameter.data.clone()  # a storage of its own, which can be emptied
                home = buffer[start : start + parameter.numel()].view(parameter.shape)
                homes[id(parameter)] = home.copy_(parameter.data)
                start += parameter.numel()
        return homes
