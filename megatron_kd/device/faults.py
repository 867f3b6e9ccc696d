"""Failures that are kept until all ranks exchange a word, where one exchange a micro batch is to tell all."""

from __future__ import annotations

from collections.abc import Callable

from megatron_kd.device.process_group import failed_elsewhere, on_any_rank
from megatron_kd.errors import RemoteRankError


class KeptFaults:
    """The first failure of this rank's work, until ``agree`` ends all ranks together for it.

    One for several kinds of work, so that the others can say what failed. Every rank must name the same kinds.
    """

    def __init__(self, *works: str) -> None:
        """``works``: what may fail, as in ``reading the samples``."""
        self._works = works
        self._failed_at = -1
        self._error: Exception | None = None

    def attempt[**P, T](self, work: str, do: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What ``do`` returns. None where it fails, of whatever kind the failure is, and after an earlier failure.

        Only for work that no other rank takes part in: one that waits for this rank in a collective is not reached by
        ``agree``.
        """
        if self._error is not None:
            return None
        try:
            return do(*args, **kwargs)
        except Exception as error:
            self._failed_at, self._error = self._works.index(work), error
            return None

    def agree(self, flag: bool = False) -> bool:
        """Whether the flag is set on any rank, where no rank failed. Collective over all ranks; one all_reduce.

        Raises:
            Exception: this rank's failure, even where a rank died as well.
            RemoteRankError: another rank failed, or died.
        """
        try:
            *failed, any_flag = on_any_rank([*(at == self._failed_at for at in range(len(self._works))), flag])
        except Exception as broken:  # a device that failed this rank's work may fail the exchange as well
            if self._error is not None:
                raise self._error from broken
            raise
        if self._error is not None:
            raise self._error
        if any(failed):
            raise RemoteRankError(failed_elsewhere(self._works[failed.index(True)]))
        return any_flag
