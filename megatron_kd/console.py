"""What the command prints and how it ends: figures, errors as one line, silence from libraries."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def quiet_libraries() -> None:
    """Silences what other libraries say while they are imported and set up; their errors still come through."""
    import logging
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        # Redrawn bars make one endless line of a log file; our own bars print lines there.
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not os.path.exists("/dev/nvidiactl"):
        # Small helpers of Megatron-Core are compiled at their first use, which needs a C++ compiler and seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def writing_to(folder: str) -> Iterator[None]:
    """A full disk does not say which file it refused: the error gets the folder's name."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or folder
        raise


def is_first_rank() -> bool:
    """Whether this process speaks for its job; true without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def print_json(value: Any) -> None:
    """JSON alone on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_figures(value: Any, as_json: bool, text: str) -> None:
    """The result of a command, once: as JSON or as text."""
    if is_first_rank():
        if as_json:
            print_json(value)
        else:
            print(text)


def say_error(error: Exception | str) -> None:
    """One line on standard error, with the rank where there are several."""
    rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    print(f"megatron-kd: {rank}error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def describe_os_error(error: OSError) -> str:
    """A full disk, a folder without permission and the like: which file, what the system says, what to look at."""
    hints = {
        errno.ENOSPC: "free some space, or choose another folder",
        errno.EDQUOT: "your quota is used up: free some space, or choose another folder",
        errno.EFBIG: "the file system or a limit (ulimit -f) allows no file that large",
        errno.EACCES: "check its permissions, or choose another folder",
        errno.EROFS: "choose a folder that can be written",
    }
    where = f"{error.filename}: " if error.filename is not None else ""
    what = error.strerror or str(error) or type(error).__name__
    return f"{where}{what}: {hints.get(error.errno or 0, 'check the path')}"


def leave(status: int) -> None:
    """Ends the process without waiting for peers: a rank that failed must not hang in a collective's destructor.

    Helpers that libraries started (a save's queue) would outlive it and hold the terminal's streams: they end first.
    """
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
