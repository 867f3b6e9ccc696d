"""Writing a .npy file whose length is not known beforehand."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray


class NpyWriter:
    """Appends rows to a .npy file. A context manager: leaving it writes the final shape and syncs the file.

    NumPy pads the header so that the first dimension can grow in place (``GROWTH_AXIS_MAX_DIGITS``).
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], row_shape: tuple[int, ...] = ()) -> None:
        self._dtype, self._row_shape = np.dtype(dtype), row_shape
        self._file = open(path, "xb")  # noqa: SIM115 - closed by __exit__
        self._write_header()
        self._header_bytes = self._file.tell()
        self.rows = 0

    def append(self, values: NDArray[Any]) -> None:
        """Appends rows [n, *row_shape]. Raises ValueError for another shape or a dtype that would be converted."""
        if values.dtype != self._dtype or values.shape[1:] != self._row_shape:
            raise ValueError(f"rows of {self._dtype} {self._row_shape} expected, got {values.dtype} {values.shape[1:]}")
        self._file.write(np.ascontiguousarray(values).data)
        self.rows += len(values)

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._write_header()
                assert self._file.tell() == self._header_bytes, "the .npy header grew over the data"
                self._file.flush()
                os.fsync(self._file.fileno())

    def _write_header(self) -> None:
        rows = getattr(self, "rows", 0)
        description = np.lib.format.dtype_to_descr(self._dtype)
        header = {"shape": (rows, *self._row_shape), "fortran_order": False, "descr": description}
        np.lib.format.write_array_header_1_0(self._file, header)
