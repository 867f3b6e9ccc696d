"""Everything that makes Megatron-Core run without a CUDA device.

Megatron-Core asks ``torch.cuda`` for devices, streams and random states in places that a CPU run reaches. Each
workaround below answers one such question, is applied once per process and only where no CUDA device is wanted, and
has a test that fails as soon as Megatron-Core no longer needs it (``tests/unit/test_device_workarounds.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

_WORKAROUNDS: dict[str, Callable[[], None]] = {}
_applied: set[str] = set()


def workaround(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a patch under its function's name."""
    _WORKAROUNDS[function.__name__] = function
    return function


def workaround_names() -> tuple[str, ...]:
    """The names of all workarounds, in the order in which they are applied."""
    return tuple(_WORKAROUNDS)


def apply_cpu_workarounds(without: Iterable[str] = ()) -> None:
    """Patches torch and Megatron-Core for a run on the CPU. Calling it again changes nothing.

    Args:
        without: names left out; used by the tests that show each one is needed.
    """
    skipped = set(without)
    for name, apply in _WORKAROUNDS.items():
        if name not in skipped and name not in _applied:
            apply()
            _applied.add(name)


@workaround
def current_device_is_cpu() -> None:
    """``device=torch.cuda.current_device()`` stands in every factory call of the tensor-parallel layers."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]


@workaround
def synchronize_is_nothing() -> None:
    """Called when the process groups are set up and before a checkpoint is written."""
    torch.cuda.synchronize = lambda device=None: None


class CpuStream:
    """A stream on a device that runs everything in order: all waiting is done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> CpuStream:
        """What has happened already is an event as good as the stream itself."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return 0


@workaround
def streams_run_in_order() -> None:
    """DDP asks for the current stream around every gradient reduction, the token dispatcher of experts for another."""
    torch.cuda.Stream = CpuStream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: CpuStream()  # type: ignore[assignment, return-value]


@workaround
def random_state_is_the_cpu_state() -> None:
    """The tracker of tensor-parallel random states saves and forks the state of the CUDA generator.

    The states are not really forked on the CPU (Megatron-Core installs a new state from a lazy CUDA callback that
    would never run and only pile up), so dropout must be 0 there; the configuration builder sees to that.
    """
    import megatron.core.tensor_parallel.random as megatron_random

    def get_rng_state(device: Any = "cpu") -> torch.Tensor:
        return torch.random.get_rng_state()

    torch.cuda.get_rng_state = get_rng_state
    torch.cuda.random.get_rng_state = get_rng_state
    megatron_random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: None


@workaround
def tensors_move_to_cuda_by_staying() -> None:
    """``Tensor.cuda()`` is called on the tied embedding and on optimizer state."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


@workaround
def float_tensors_name_the_cuda_type() -> None:
    """The optimizers tell precisions apart by comparing ``param.type()`` with ``torch.cuda.FloatTensor``."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):  # what another tensor's type() said: a.type(b.type()) is an idiom
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[assignment, method-assign]


@workaround
def factories_build_cuda_tensors_on_cpu() -> None:
    """``device="cuda"`` is a literal in schedules, gradient clipping and the optimizers.

    The factories are wrapped one by one: a TorchFunctionMode would not be active in backward, where activation
    recomputation calls them.
    """
    # ``with torch.device("meta")`` knows the factories by identity and collects them at its first use: let it collect
    # the real ones, or models built on the meta device (transformers does) come up with memory nobody filled.
    torch.utils._device._device_constructors()

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def build(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs["device"] = "cpu"
            # Pinning speeds up a copy that does not take place, and without a device it is refused.
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        # Found by this name when it is pickled; the original's own is not to be found.
        build.__module__, build.__qualname__ = "torch", factory.__name__
        return build

    for name in ("tensor", "zeros", "empty", "ones", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


@workaround
def splits_of_an_exchange_are_lists() -> None:
    """The token dispatcher of experts copies the sizes it exchanges from the device as NumPy arrays.

    On the CPU it leaves them as they are, tensors, which ``all_to_all_single`` does not take.
    """
    original = torch.distributed.all_to_all_single

    def plain(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def exchange(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(output, input, plain(output_split_sizes), plain(input_split_sizes), *args, **kwargs)

    torch.distributed.all_to_all_single = exchange


@workaround
def adam_keeps_its_step_in_the_group() -> None:
    """The distributed optimizer's checkpoints expect the layout of the fused Adams; see ``GroupStepAdamW``."""
    from megatron_kd.device.group_step_adam import install_group_step_adam

    install_group_step_adam()
