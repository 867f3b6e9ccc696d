"""A disk that refuses to be read says nothing about the cache: nobody may take its shards for damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.cache.verify import verify
from megatron_kd.errors import StoreUnreachableError
from tests.unit.cache_rows import make_cache


@pytest.mark.parametrize("name", ["commits/000001.json", "rank/c.0.0", "tokens/zarr.json"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_is_refused_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    cache, _ = make_cache(tmp_path / "c", [30, 40, 50], 1)
    opened = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(name) and "000001" in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreUnreachableError, match=os.strerror(code)):
        verify(cache, "structure")
