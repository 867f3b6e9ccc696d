"""Megatron-Core's distributed save in three parts: what is taken from memory, what is written, what is agreed on.

Only the second takes long, and it needs no other rank: a thread may do it while the training goes on.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_kd.device import fail_together, first_message, lost_ranks_reported
from megatron_kd.errors import CheckpointError
from megatron_kd.models.checkpoint_files import describe_files, one_line


class ShardedWrite:
    """A save into a partial directory that has begun: ``write`` on every rank, then ``finish`` on all together."""

    def __init__(
        self,
        state: dict[str, Any],
        partial: Path,
        final: Path,
        metadata: dict[str, Any] | None = None,
        *,
        detached: bool = False,
    ) -> None:
        """Plans the files and brings the tensors into host memory. Collective.

        Args:
            state: a sharded state dict, which is used up.
            detached: whoever owns the tensors may change them before ``write`` has ended: they are copied where they
                lie in host memory already.

        Raises:
            CheckpointError: on every rank, where one could not; RemoteRankError: a rank died.
        """
        self._partial, self._final = partial, final
        self._error: Exception | None = None
        self._own: dict[str, Any] = {}
        owned = _storages(state) if detached else set()
        # Megatron-Core would start a manager process for what its forked savers found out. It lives as long as
        # training: a signal to the whole job (``scancel --signal``) ends it and with it the next save, and a killed
        # rank leaves it behind for ever.
        self._found: queue.Queue[Any] = queue.Queue()
        filesystem_async._results_queue = self._found
        with self._reported():
            self._request = dist_checkpointing.save(
                state,
                str(partial),
                content_metadata=metadata,
                async_sharded_save=True,
                async_strategy="mcore",
            )
        self._buckets: list[WriteBucket] = []
        if self._request.async_fn is not None:
            self._buckets = self._request.async_fn_args[1]  # the writer counts them once more at the end
            self._buckets[:] = [_apart(bucket, owned) for bucket in self._request.preload_fn()]

    def write(self) -> None:
        """This rank's files and their hashes. Raises nothing: ``finish`` says what failed. No collective."""
        try:
            results = {}
            for index, bucket in enumerate(self._buckets):
                _, result = FileSystemWriterAsync.write_preloaded_data(
                    self._request.async_fn.args[0], index, bucket, None, None, use_fsync=True
                )
                if isinstance(result, Exception):
                    raise result
                results[index] = result
            if self._buckets:
                self._found.put(results)
            # Read back, from memory as a rule.
            self._own = describe_files(self._partial, [name for _, name, _ in self._buckets])
        except Exception as error:
            self._error = error
        for _, _, (objects, tensors) in self._buckets:
            objects.clear()
            tensors.clear()

    def finish(self) -> dict[str, Any]:
        """What holds the files together, written by the first rank. Collective.

        Returns:
            On the first rank the hashes of all files, which belong under ``files`` into the note; on others nothing.

        Raises:
            CheckpointError: on every rank the same, where one could not write: a full disk, a quota.
            RemoteRankError: a rank died.
        """
        said = first_message(one_line(_system_error(self._error)) if self._error is not None else None)
        if said is not None:
            raise self._unwritten(said) from self._error
        with self._reported():
            for finalize in self._request.finalize_fns:
                finalize()
        with fail_together(f"saving {self._final}"):
            if dist.get_rank() == 0:
                beside = [file.name for file in self._partial.iterdir() if file.is_file() and file.suffix != ".distcp"]
                self._own |= describe_files(self._partial, sorted(beside))
        gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        with lost_ranks_reported():
            dist.gather_object(self._own, gathered if dist.get_rank() == 0 else None)
        return {name: told for part in gathered for name, told in part.items()}

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            with lost_ranks_reported():
                yield
        except (CheckpointingException, CheckpointException, OSError) as error:
            raise self._unwritten(one_line(_system_error(error))) from error

    def _unwritten(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._final} could not be written ({reason}): check that {self._partial.parent} has room and "
            "may be written; nothing stands under its name"
        )


def _system_error(error: BaseException) -> BaseException:
    """What the system said, where that is behind an error: of a file cut short torch reports its own surprise."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__cause__ or behind.__context__
    return behind or error


def write_sharded(
    state: dict[str, Any], partial: Path, final: Path, metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """All three parts, one after the other; returns and raises as ``ShardedWrite.finish``. Collective."""
    begun = ShardedWrite(state, partial, final, metadata)
    begun.write()
    return begun.finish()


def _storages(state: dict[str, Any]) -> set[int]:
    """Where the tensors of a sharded state dict lie in host memory."""
    tensors = (getattr(value, "data", value) for value in nested_values(state))
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if isinstance(tensor, Tensor) and tensor.device.type == "cpu"
    }


def _apart(bucket: WriteBucket, owned: set[int]) -> WriteBucket:
    """The bucket with tensors of its own in place of those that lie in ``owned`` memory."""
    path, name, (objects, tensors) = bucket
    copied = [(item, t.clone() if t.untyped_storage().data_ptr() in owned else t) for item, t in tensors]
    return path, name, (objects, copied)
