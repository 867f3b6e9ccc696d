"""Peak memory of a computation on the CPU, counted in bytes of tensors rather than guessed from the process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _StorageCounter(TorchDispatchMode):
    """Counts the bytes of storages that appear as results of operators, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.known: set[int] = set()
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # What comes in without having been made here was there before: it is not extra.
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._see(leaf, extra=False)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf, extra=True)
        return result

    def _see(self, tensor: Tensor, extra: bool) -> None:
        storage = tensor.untyped_storage()
        # The address of the StorageImpl is unique while it lives, and the finalizer runs when it dies.
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = storage.nbytes() if extra else 0
        self.alive[key] = size
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.known.discard(key)
        self.current -= self.alive.pop(key, 0)


def peak_extra_bytes(fn: Callable[[], Any]) -> int:
    """The most bytes alive at once, inside ``fn``, in tensors that ``fn`` made, results included.

    Tensors that exist before are not counted; those that autograd makes in backward are. Scratch memory inside one
    operator is not seen. ``fn`` runs once. Threads that ``fn`` starts are not seen, but CPU backward passes run on
    the calling thread.
    """
    counter = _StorageCounter()
    with counter:
        fn()
    return counter.peak
