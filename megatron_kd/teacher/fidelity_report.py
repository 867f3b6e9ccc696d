"""What ``cache fidelity`` reports: sums over positions, their JSON and their tables. c positions, K kept ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.cache.values import VALUE_DTYPES
from megatron_kd.teacher.fidelity_cache import CacheFidelity
from megatron_kd.teacher.fidelity_rows import FORMS, DenseRows, compare, first_k, rounded, stored_tail


class FidelitySums:
    """Float64 sums over the positions that train, for every (K, value dtype, tail)."""

    def __init__(self, ks: Sequence[int], device: torch.device) -> None:
        self.cases = list(product(ks, VALUE_DTYPES, FORMS))
        self._ks = ks
        # Columns: finite KL, positions where it is infinite, loss, squares of the relative error of the gradient and of
        # what rounding adds to it, mass of the top K.
        self._sums = torch.zeros((len(self.cases), 6), dtype=torch.float64, device=device)
        # Positions, positions with a gradient, dense KL.
        self._totals = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, dense: DenseRows, ids: Tensor, counted: Tensor) -> None:
        """c positions; ids [c, at least the largest K] descend in probability, ``counted`` is bool [c]."""
        norm2 = dense.gradient_norm2
        has_gradient = counted & (norm2 > 0)
        self._totals += torch.stack([counted.sum(), has_gradient.sum(), dense.kl[counted].sum()])
        whole = dense.keep(ids[:, : self._ks[-1]])
        stored = {dtype: rounded(whole.log_p, dtype) for dtype in VALUE_DTYPES}
        kept = {k: first_k(whole, k) for k in self._ks}
        for case, (k, dtype, form) in enumerate(self.cases):
            log_r = stored[dtype][:, :k]
            lost = compare(kept[k], log_r, stored_tail(kept[k], log_r, form), form)
            finite = counted & torch.isfinite(lost.kl)
            figures = (
                lost.kl[finite].sum(),
                (counted & ~finite).sum(),
                lost.loss[counted].sum(),
                (lost.gradient_error2 / norm2)[has_gradient].sum(),
                (lost.rounding_error2 / norm2)[has_gradient].sum(),
                kept[k].log_p.exp().sum(dim=1)[counted].sum(),
            )
            self._sums[case] += torch.stack([figure.double() for figure in figures])

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Adds up over the data-parallel ranks. Collective."""
        dist.all_reduce(self._sums, group=group)
        dist.all_reduce(self._totals, group=group)

    @property
    def tokens(self) -> int:
        """Positions counted."""
        return int(self._totals[0])

    @property
    def dense_kl(self) -> float:
        """KL(teacher ‖ student) per position, in nats."""
        return float(self._totals[2]) / self.tokens

    def results(self) -> list[dict[str, Any]]:
        """One JSON object for each (K, value dtype, tail); see docs/cache.md."""
        with_gradient = float(self._totals[1])

        def rms(squares: float) -> float | None:
            return math.sqrt(squares / with_gradient) if with_gradient else None

        return [
            {
                "top_k": k,
                "value_dtype": dtype,
                "tail": form,
                "teacher_mass": mass / self.tokens,
                "kl": None if infinite else kl / self.tokens,
                "kl_infinite": infinite / self.tokens,
                "loss": loss / self.tokens,
                "gradient_error": rms(error2),
                "rounding_error": rms(rounding2),
            }
            for (k, dtype, form), (kl, infinite, loss, error2, rounding2, mass) in zip(
                self.cases, self._sums.tolist(), strict=True
            )
        ]


@dataclass(frozen=True)
class FidelityReport:
    """All that was measured.

    Attributes:
        student: on whose gradient, in words.
        probe: the first sample id and the one after the last.
        value_dtype, top_k: what the recipe's capture stores.
        cache: None where the recipe's cache does not exist.
    """

    teacher: str
    student: str
    temperature: float
    samples: str
    split: str
    probe: tuple[int, int]
    value_dtype: str
    top_k: int
    sums: FidelitySums
    cache: CacheFidelity | None

    @property
    def ok(self) -> bool:
        """Whether no cached row is wrong."""
        return self.cache is None or not self.cache.wrong

    def to_json(self) -> dict[str, Any]:
        """JSON values; ``results`` has one object for each (K, value dtype, tail)."""
        return {
            "teacher": self.teacher,
            "student": self.student,
            "temperature": self.temperature,
            "probe": {
                "samples": self.samples,
                "split": self.split,
                "first_sample": self.probe[0],
                "rows": self.probe[1] - self.probe[0],
                "tokens": self.sums.tokens,
            },
            "top_k": self.top_k,
            "value_dtype": self.value_dtype,
            "dense_kl": self.sums.dense_kl,
            "results": self.sums.results(),
            "cache": None if self.cache is None else self.cache.to_dict(),
        }

    def text(self) -> str:
        """Tables for a terminal: by K and tail, by value dtype, the cache."""
        results = self.sums.results()
        first, last = self.probe[0], self.probe[1] - 1
        parts = [
            f"teacher {self.teacher} at temperature {self.temperature:g}, {self.split} samples {first} to {last} of "
            f"{self.samples}, {self.sums.tokens:,} tokens",
            f"student: {self.student}; dense KL(teacher ‖ student) {self.sums.dense_kl:.4g} nats",
            "",
            f"values as {self.value_dtype}; gradient error relative to the dense KL's, by tail",
            _by_k([row for row in results if row["value_dtype"] == self.value_dtype]),
            "",
            f"top {self.top_k}, by value dtype",
            _by_dtype([row for row in results if row["top_k"] == self.top_k]),
        ]
        return "\n".join(parts if self.cache is None else [*parts, "", self.cache.text()])


_SHORT = dict(zip(FORMS, ("bucket", "subtracted", "truncate", "renorm. teacher", "renorm. both"), strict=True))


def _by_k(results: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'K':>7} {'mass':>8} {'KL bucket':>10} " + " ".join(f"{name:>15}" for name in _SHORT.values())]
    for k in dict.fromkeys(row["top_k"] for row in results):
        rows = {row["tail"]: row for row in results if row["top_k"] == k}
        errors = " ".join(f"{_figure(rows[form]['gradient_error']):>15}" for form in FORMS)
        bucket = rows["bucket"]
        lines.append(f"{k:>7} {bucket['teacher_mass']:>8.4f} {_figure(bucket['kl']):>10} {errors}")
    return "\n".join(lines)


def _by_dtype(results: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'values':<9} {'tail':<16} {'KL':>10} {'loss':>10} {'gradient error':>15} {'by rounding':>12}"]
    for row in results:
        kl = f"∞ {row['kl_infinite']:.1%}" if row["kl"] is None else _figure(row["kl"])
        lines.append(
            f"{row['value_dtype']:<9} {_SHORT[row['tail']]:<16} {kl:>10} {_figure(row['loss']):>10} "
            f"{_figure(row['gradient_error']):>15} {_figure(row['rounding_error']):>12}"
        )
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
