"""Importers of other systems' caches. ``open_source`` finds the right one, ``import_cache`` fills a cache from it."""

from __future__ import annotations

from pathlib import Path

from megatron_kd.cache.importers.plan import ImportReport, import_cache
from megatron_kd.cache.importers.source import Samples, Source
from megatron_kd.errors import CacheError

__all__ = ["FORMATS", "ImportReport", "import_cache", "open_source"]

FORMATS = ("megatron-lm", "distillkit")


def open_source(
    format_name: str, path: Path | str, samples: Samples, *, vocab_size: int, first_iteration: int = 0
) -> Source:
    """Opens a cache of another system.

    Args:
        format_name: one of ``FORMATS``.
        vocab_size: V of the teacher.
        first_iteration: of Megatron-LM's first layout: the number of the iteration that saw sample 0. Others have none.

    Raises:
        CacheError: for an unknown format, and for whatever makes the source unfit for these samples.
    """
    path = Path(path)
    packing = samples.manifest["request"]["packing"]
    if packing != "concatenate":
        raise CacheError(
            f"{samples.path} is packed as {packing!r}, the rows of {format_name} were scored without regard to "
            "documents: capture these samples instead, or prepare others with data.packing concatenate"
        )
    if format_name not in FORMATS:
        raise CacheError(f"format {format_name!r} cannot be imported, only {', '.join(FORMATS)}")
    if not path.is_dir():
        raise CacheError(f"{path} is not a folder: name the one that {format_name} wrote its files to")
    if format_name == "megatron-lm":
        from megatron_kd.cache.importers.megatron_tar import MegatronTars

        return MegatronTars(path, samples, vocab_size=vocab_size, first_iteration=first_iteration)
    if first_iteration:
        raise CacheError(f"--first-iteration is for megatron-lm: rows of {format_name} are found by their tokens")
    from megatron_kd.cache.importers.distillkit import DistillKitParquet

    return DistillKitParquet(path, samples, vocab_size=vocab_size)
