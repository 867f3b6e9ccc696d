"""One log file per rank; what a user should see at once also on the terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class _LogFile(logging.FileHandler):
    """Loses the lines that a full disk does not take: they must not hide the error that a run ends with."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def log_to_file(path: Path, *, warn_on_terminal: bool) -> Iterator[None]:
    """Appends this package's log to a file while entered.

    Args:
        warn_on_terminal: print warnings on standard error too; for the first rank.
    """
    file = _LogFile(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file]
    if warn_on_terminal:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(logging.WARNING)
        terminal.setFormatter(logging.Formatter("megatron-kd: %(message)s"))
        handlers.append(terminal)
    root = logging.getLogger("megatron_kd")
    level = root.level
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
