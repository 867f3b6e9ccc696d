"""What a folder of Megatron-LM's tars holds: the parts of every iteration or span, and the settings of the run.

Nothing is decoded here: names, the directories of the tars and their metadata are enough to see what is missing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from megatron_kd.cache.importers.payload import Member, members
from megatron_kd.errors import CacheError

MAX_VOCAB_SIZE = 2**17
"""Ids are stored in 17 bits."""
VALUE_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
META = "_meta.json"
_FIRST = re.compile(r"cp(\d{1,6})_dp(\d{1,6})__(\d{1,18})\.tar", re.ASCII)
_SECOND = re.compile(r"dp(\d{1,6})__(\d{1,18})-(\d{1,18})\.tar", re.ASCII)
_ITERATION = re.compile(r"(\d{1,18})\.pt\.zst", re.ASCII)
_SPAN = re.compile(r"(\d{1,18})-(\d{1,18})\.pt\.zst", re.ASCII)
_MAX_META_BYTES = 2**20

Rank = tuple[int, int]
"""Context-parallel, data-parallel; of the second layout the first is always 0."""
Span = tuple[int, int]
"""Samples [start, end) of the second layout; of the first layout an iteration and the one after it."""


@dataclass(frozen=True)
class TarFolder:
    """A complete set of parts.

    Attributes:
        layout: 1 or 2.
        context_parallel, data_parallel: how many ranks wrote.
        parts: for every span, ascending, the member of every rank.
        meta: ``_meta.json``, the same in all tars.
        digest: of names and sizes of all members.
    """

    path: Path
    layout: int
    context_parallel: int
    data_parallel: int
    parts: dict[Span, dict[Rank, Member]]
    meta: dict[str, Any]
    digest: str

    @property
    def saver(self) -> dict[str, Any]:
        """The settings at saving: k, save_dtype, and of the second layout mbs_save and dp_size_save."""
        return dict(self.meta["saver"])


@dataclass(frozen=True)
class _Tar:
    path: Path
    layout: int
    rank: Rank
    number: int


def read_folder(path: Path) -> TarFolder:
    """Lists a folder of tars.

    Raises:
        CacheError: no, mixed, foreign or damaged tars, tars of two runs, a part that is there twice, or parts that some
            ranks have and others lack, the first five named.
    """
    tars = _tars(path)
    layout = tars[0].layout
    ranks = sorted({tar.rank for tar in tars})
    cp, dp = (max(rank[i] for rank in ranks) + 1 for i in range(2))
    if cp * dp > len(ranks):
        there = set(ranks)
        absent = ((c, d) for c in range(cp) for d in range(dp) if (c, d) not in there)
        words = ", ".join(_rank_words(rank, layout) for rank in islice(absent, 5))
        raise CacheError(f"{path} is incomplete: it has no tars of {words}")
    meta, parts, digest = _members(path, tars)
    missing = [(span, rank) for span in parts for rank in ranks if rank not in parts[span]]
    if missing:
        words = ", ".join(f"{span_words(span, layout)} of {_rank_words(rank, layout)}" for span, rank in missing[:5])
        raise CacheError(f"{path} is incomplete: it lacks {words}{and_more(len(missing))}")
    _check_saver(path, meta["saver"], layout, dp)
    return TarFolder(path, layout, cp, dp, parts, meta, digest)


def and_more(count: int) -> str:
    """What follows the first five of ``count`` things."""
    return f" and {count - 5} more" if count > 5 else ""


def span_words(span: Span, layout: int) -> str:
    """A span for messages."""
    return f"iteration {span[0]}" if layout == 1 else f"samples {span[0]}-{span[1]}"


def _rank_words(rank: Rank, layout: int) -> str:
    return f"cp{rank[0]}_dp{rank[1]}" if layout == 1 else f"dp{rank[1]}"


def _tars(folder: Path) -> list[_Tar]:
    """The tars of a folder, all of one layout, by rank and number."""
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".tar"))
    tars = []
    for name in names:
        if first := _FIRST.fullmatch(name):
            tars.append(_Tar(folder / name, 1, (int(first[1]), int(first[2])), int(first[3])))
        elif second := _SECOND.fullmatch(name):
            tars.append(_Tar(folder / name, 2, (0, int(second[1])), int(second[2])))
        else:
            raise CacheError(
                f"{folder / name} has no name of a layout that can be read (cp0_dp0__99.tar or dp0__0-640.tar)"
            )
    if not tars:
        raise CacheError(f"{folder} holds no tars of Megatron-LM's offline distillation")
    if len({tar.layout for tar in tars}) > 1:
        raise CacheError(f"{folder} mixes two layouts of tars (cp0_dp0__99.tar and dp0__0-640.tar): keep one of them")
    return sorted(tars, key=lambda tar: (tar.rank, tar.number))


def _members(folder: Path, tars: list[_Tar]) -> tuple[dict[str, Any], dict[Span, dict[Rank, Member]], str]:
    """The metadata, the parts by ascending span, the digest."""
    meta: dict[str, Any] | None = None
    parts: dict[Span, dict[Rank, Member]] = {}
    state = xxhash.xxh3_128()
    for tar in tars:
        ours: dict[str, Any] | None = None
        for member in members(tar.path):
            if member.name == META:
                ours = _read_meta(member)
                continue
            span = _span_of(member, tar.layout)
            if span is None:
                continue
            of_span = parts.setdefault(span, {})
            if tar.rank in of_span:
                raise CacheError(f"{member.where} is there a second time, in {of_span[tar.rank].tar.name}: remove one")
            of_span[tar.rank] = member
            state.update(f"{tar.rank}/{member.name}/{member.size}\n".encode())
        if ours is None:
            raise CacheError(f"{tar.path} has no {META}: nothing says what it was made from")
        if meta is not None and meta != ours:
            raise CacheError(f"{tar.path} is of another run than {tars[0].path.name}: their {META} differ")
        meta = ours
    if not parts or meta is None:
        raise CacheError(f"the tars of {folder} hold no rows")
    return meta, dict(sorted(parts.items())), state.hexdigest()


def _span_of(member: Member, layout: int) -> Span | None:
    match = (_ITERATION if layout == 1 else _SPAN).fullmatch(member.name)
    if match is None:
        return None
    if layout == 1:
        return int(match[1]), int(match[1]) + 1
    start, stop = int(match[1]), int(match[2])
    if start >= stop:
        raise CacheError(f"{member.where} is no span of samples")
    return start, stop


def _read_meta(member: Member) -> dict[str, Any]:
    if member.size > _MAX_META_BYTES:
        raise CacheError(f"{member.where} has {member.size} bytes, far more than metadata needs")
    try:
        meta = json.loads(member.read(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{member.where} is not JSON: {error}") from error
    if not isinstance(meta, dict) or not isinstance(meta.get("saver"), dict):
        raise CacheError(f"{member.where} does not say how it was saved (no saver)")
    return meta


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_saver(folder: Path, saver: dict[str, Any], layout: int, dp: int) -> None:
    dtype = saver.get("save_dtype")
    if not isinstance(dtype, str) or dtype not in VALUE_DTYPES:
        raise CacheError(f"{folder}: save_dtype {dtype!r} must be one of {', '.join(VALUE_DTYPES)}")
    for name in ("k",) if layout == 1 else ("k", "mbs_save", "dp_size_save"):
        value = saver.get(name)
        if not isinstance(value, int) or not 1 <= value <= MAX_VOCAB_SIZE:
            raise CacheError(f"{folder}: saver.{name} in {META} is {value!r}, not a size")
    if layout == 2 and saver["dp_size_save"] != dp:
        raise CacheError(f"{folder} is incomplete: {dp} of {saver['dp_size_save']} data-parallel ranks have tars")
