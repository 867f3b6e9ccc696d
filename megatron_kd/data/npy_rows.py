"""A .npy file that is mapped, and open for reads that can fail.

A mapped page that the disk does not give ends the process (SIGBUS), without a word; a read says what is wrong. A job of
many ranks needs the word.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_kd.errors import DataError


class NpyRows:
    """Rows of an array in a .npy file. Costs nothing to open and to fork; safe in threads.

    Attributes:
        mapped: the whole array, read-only, of the same file as the reads even where its name is given to another.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, or ValueError for what is no array in C order or is too short."""
        self._path = path
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"version {version} of the .npy format")
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            if fortran or dtype.hasobject:
                raise ValueError(f"an array of {dtype} {shape} that is not laid out row by row")
            self._begin = file.tell()
            # A plain view: indexing a memmap object is several times slower. An empty file cannot be mapped.
            self.mapped: NDArray[Any] = (
                np.asarray(np.memmap(file, dtype, "r", self._begin, shape)) if all(shape) else np.empty(shape, dtype)
            )
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """A copy of the rows [start, stop), by reads.

        Raises:
            IndexError: for rows that the array does not have.
            DataError: the file ends before, or the system refuses.
        """
        if not 0 <= start <= stop <= len(self.mapped):
            raise IndexError(f"rows [{start}, {stop}) of {self._path}, which has {len(self.mapped)}")
        rows = np.empty((stop - start, *self.mapped.shape[1:]), self.mapped.dtype)
        into = memoryview(rows.reshape(-1).view(np.uint8))
        at = self._begin + start * (rows.nbytes // max(stop - start, 1))
        while into:
            try:
                got = os.preadv(self._descriptor, [into], at)
            except OSError as error:
                raise DataError(
                    f"{self._path} cannot be read ({error.strerror}): look at its disk, or restore the file"
                ) from error
            if not got:
                raise DataError(f"{self._path} is truncated (no bytes from {at} on): restore it, or prepare again")
            into, at = into[got:], at + got
        return rows
