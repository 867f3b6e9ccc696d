"""``bench cache``: bytes per token and rates of the cache beside other formats, on the targets of a real teacher."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.bench.cache_capture import ROW_LENGTH, capture_rows, find_demo_recipe
from megatron_kd.bench.cache_formats import RANK_TABLE, Format, OwnFormat, stored_bytes
from megatron_kd.bench.cache_measure import CP_READ, ORDERED_READ, READ, WRITE, Measurement, measure
from megatron_kd.bench.cache_megatron import MegatronLM, check_megatron_lm
from megatron_kd.bench.cache_parquet import Parquet, check_pyarrow
from megatron_kd.bench.cache_rows import CONTEXT_PARALLEL, BenchRows, rows_of_cache
from megatron_kd.bench.cache_table import cache_table
from megatron_kd.bench.neighbours import Neighbours
from megatron_kd.bench.peers import PeerUnavailableError
from megatron_kd.bench.settings import check_positive
from megatron_kd.bench.threads import torch_threads
from megatron_kd.cache.store import cache_exists
from megatron_kd.config import load_recipe
from megatron_kd.errors import ConfigError
from megatron_kd.progress import progress

FULL_SHARD_TOKENS = 2 * 2**20
"""Of a shard as captures write it: what one rank table is spread over, at the least."""
_SIZE_TOLERANCE = 0.01


@dataclass(frozen=True)
class CacheReport:
    """The rows of the result, what they were measured on, and what a reader of them must know."""

    results: list[dict[str, Any]]
    targets: dict[str, Any]
    rank_table: dict[str, Any]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """``results``, ``targets``, ``rank_table`` and ``notes``."""
        return {
            "results": self.results,
            "targets": self.targets,
            "rank_table": self.rank_table,
            "notes": self.notes,
        }

    def text(self) -> str:
        """What was measured, a table, and what the bytes of this project's cache are."""
        return cache_table(self.results, self.targets, self.rank_table)


def bench_cache(
    recipe: Path | str | None = None,
    overrides: Sequence[str] = (),
    *,
    cache: Path | str | None = None,
    tokens: int = 8192,
    row_length: int | None = None,
    top_k: int | None = None,
    rate_tokens: int = 131072,
    rounds: int = 7,
    say: Callable[[str], None] = lambda line: None,
    show_progress: bool = True,
) -> CacheReport:
    """Measures all formats on the rows of a cache: the given one, the recipe's, or one captured for the purpose.

    Args:
        recipe, overrides: its teacher.cache is taken if it is there, else its teacher captures rows of its corpus; by
            default the demo's teacher does.
        cache: an existing cache, instead of a recipe.
        tokens: to measure the sizes of.
        row_length: of captured rows, by default 2,048; with it, an existing cache is not looked for.
        top_k: by default all slots of the cache, or those of the recipe.
        rate_tokens: to take the rates of: the rows are repeated until they have so many.
        rounds: of the rates.
        say: gets what should be known before the long parts.

    Raises:
        ConfigError: options that contradict each other or fit no cache.
        KDError: a cache that cannot be read, a recipe that cannot be captured.
    """
    for name, value in (("tokens", tokens), ("rate-tokens", rate_tokens), ("rounds", rounds), ("top-k", top_k)):
        check_positive(name, value)
    if row_length is not None and row_length < 2 * CONTEXT_PARALLEL:
        raise ConfigError(f"row-length is {row_length}, must be at least {2 * CONTEXT_PARALLEL}")
    if cache is not None and (recipe is not None or row_length is not None):
        raise ConfigError(f"--cache {cache} already has its rows: give it without a recipe and without --row-length")
    with tempfile.TemporaryDirectory(prefix="megatron-kd-bench-") as name:
        folder = Path(name)
        rows = _rows(recipe, overrides, cache, folder, tokens, row_length, top_k, say, show_progress)
        formats, notes = _formats(rows, folder)
        repeated = rows.repeated(rate_tokens)
        in_sample = OwnFormat("in_sample", "float16", rows.rank_table(in_sample=True), rows.manifest)
        with (
            torch_threads(1),
            progress("bench cache", len(formats) * (1 + rounds), unit="passes", enabled=show_progress) as advance,
        ):
            neighbours = Neighbours()  # what ran beside the capture does not matter
            found = measure(formats, rows.measured, repeated, rounds, folder, advance)
            notes += _neighbour_notes(neighbours)
        in_sample.write(folder / "in_sample", rows.measured)
        lower = sum(size for part, size in stored_bytes(in_sample, folder / "in_sample").items() if part != RANK_TABLE)
    results = _results(formats, found, rows)
    notes = [*_source_notes(rows), *notes, *_size_notes(formats, found, rows, repeated)]
    notes += [f"{stored_as.name}: {stored_as.remark}" for stored_as in formats if stored_as.remark]
    targets = {
        "source": rows.source,
        "tokens": rows.tokens,
        "rows": len(rows.measured),
        "row_tokens": [min(map(len, rows.measured)), max(map(len, rows.measured))],
        "rate_tokens": sum(map(len, repeated)),
        "rounds": rounds,
        "cpu": platform.processor() or platform.machine(),
    }
    size = found[0].parts[RANK_TABLE]
    table = {
        "bytes": size,
        "bytes_per_token_of_a_full_shard": size / FULL_SHARD_TOKENS,
        "counted_positions": rows.counted_positions or rows.tokens,
        "in_sample": not rows.counted,
        "bytes_per_token_in_sample": lower / rows.tokens,
    }
    return CacheReport(results, targets, table, notes)


def _rows(
    recipe: Path | str | None,
    overrides: Sequence[str],
    cache: Path | str | None,
    folder: Path,
    tokens: int,
    row_length: int | None,
    top_k: int | None,
    say: Callable[[str], None],
    show_progress: bool,
) -> BenchRows:
    """The rows of a cache that is there, or of one captured into ``folder``."""
    if cache is not None:
        return rows_of_cache(cache, str(cache), tokens=tokens, top_k=top_k)
    if recipe is not None and row_length is None:
        existing = load_recipe(recipe, overrides).teacher.cache
        if existing is not None and cache_exists(existing):
            return rows_of_cache(existing, str(existing), tokens=tokens, top_k=top_k)
    path = find_demo_recipe() if recipe is None else Path(recipe)
    captured = capture_rows(
        path,
        overrides,
        folder / "captured",
        tokens=tokens,
        row_length=row_length or ROW_LENGTH,
        top_k=top_k,
        say=say,
        show_progress=show_progress,
    )
    return rows_of_cache(captured, f"captured by {path}", tokens=tokens, top_k=top_k)


def _formats(rows: BenchRows, folder: Path) -> tuple[list[Format], list[str]]:
    """This project's formats and the peers that can be used here, and a line for each other peer."""
    table, manifest = rows.rank_table(), rows.manifest
    plain = np.arange(manifest.vocab_size, dtype="<u4")
    found: list[Format] = [
        OwnFormat("ours", "float16", table, manifest),
        OwnFormat("ours", "bfloat16", table, manifest),
        OwnFormat("ours_plain_ids", "float16", plain, manifest),
    ]
    notes = []
    peers: list[tuple[Format, Callable[[], None]]] = [
        (MegatronLM(), lambda: check_megatron_lm(manifest.vocab_size)),
        (Parquet(rows.top_k), check_pyarrow),
    ]
    for peer, check in peers:
        try:
            check()
            _try(peer, rows, folder / f"try-{peer.name}")
            found.append(peer)
        except PeerUnavailableError as reason:
            notes.append(f"{peer.name} is left out: {reason}")
    return found, notes


def _try(peer: Format, rows: BenchRows, folder: Path) -> None:
    """Raises PeerUnavailableError for a peer that breaks on one row: it must not keep us from measuring the others."""
    try:
        peer.write(folder, rows.measured[:1])
        peer.open(folder).read(0)
    except Exception as error:
        raise PeerUnavailableError(f"it failed on one row ({type(error).__name__}: {error})") from error


def _results(formats: Sequence[Format], found: Sequence[Measurement], rows: BenchRows) -> list[dict[str, Any]]:
    peer = next((seen for kind, seen in zip(formats, found, strict=True) if isinstance(kind, MegatronLM)), None)
    results = []
    for stored_as, seen in zip(formats, found, strict=True):
        medians = {f"{name}_tokens_per_s": seen.median(name) for name in (WRITE, READ, CP_READ, ORDERED_READ)}
        ratios = None
        if peer is not None:
            ratios = {name: seen.ratio(name, peer) for name in (WRITE, READ, CP_READ, ORDERED_READ)}
            ratios = {"bytes": seen.bytes / peer.bytes, **ratios}
        results.append(
            {
                "format": stored_as.name,
                "values_dtype": stored_as.values_dtype,
                "top_k": rows.top_k,
                "vocab": rows.manifest.vocab_size,
                "bytes_per_token": seen.bytes / rows.tokens,
                **medians,
                "spread": {name: [min(rates), max(rates)] for name, rates in seen.rates.items()},
                "bytes_per_token_by_part": {
                    part: size / rows.tokens for part, size in seen.parts.items() if part != RANK_TABLE
                },
                "largest_value_error": seen.value_error,
                "ratio_to_megatron_lm": ratios,
            }
        )
    return results


def _source_notes(rows: BenchRows) -> list[str]:
    notes = ["files are in the page cache; rates are tokens per CPU second of one thread"]
    if not rows.counted:
        notes.append("the cache has one row: its rank table is counted from the measured positions themselves")
    if rows.manifest.value_dtype == "float32":
        notes.append("the cache holds float32 values, which are rounded to float16 here")
    if len(rows.manifest.temperatures) > 1:
        notes.append("only the first temperature is kept here")
    return notes


def _size_notes(
    formats: Sequence[Format], found: Sequence[Measurement], rows: BenchRows, repeated: Sequence[Any]
) -> list[str]:
    """Repeated rows must not compress better than single ones, or the rates would be of other work."""
    times = len(repeated) // len(rows.measured)
    notes = [f"rates are of the measured rows {times} times under other sample ids"] if times > 1 else []
    for stored_as, seen in zip(formats, found, strict=True):
        change = (_payload(seen.repeated_parts) / times) / _payload(seen.parts) - 1
        if change < -_SIZE_TOLERANCE:
            which = f"{stored_as.name} ({stored_as.values_dtype})"
            notes.append(f"{which}: repeated rows take {-change:.1%} less space a token, its rates are of easier data")
    return notes


def _payload(parts: dict[str, int]) -> int:
    """Bytes that grow with the rows."""
    return sum(size for part, size in parts.items() if part not in (RANK_TABLE, "metadata"))


def _neighbour_notes(neighbours: Neighbours) -> list[str]:
    others = neighbours.cores()
    if others < 0.5:
        return []
    return [f"other processes kept {others:.1f} cores busy: rates may be lower than on an idle machine, ratios hold"]
