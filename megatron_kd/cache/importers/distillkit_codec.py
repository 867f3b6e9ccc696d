"""The compression of DistillKit: k descending log-probabilities and their ids in a fixed number of bytes a position.

Log-probability bytes are ``exact_k`` values, then coefficients of a fit to the others, then residual bins. Value
i ≥ exact_k is Σ_j c_j·f_j(t) + residual with t = i − exact_k (or 0 … 1 with ``normalize_t``) and f = t^n, sqrt or exp;
with ``delta_encoding`` all k are differences, added up in float32. Ids are k numbers of ⌈log2 d⌉ bits, the most
significant first, in one stream. The settings stand in ``compression_config.yaml`` alone: with other ones the bytes
decode to something else.

Legend: P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_kd.cache.values import from_patterns, to_patterns
from megatron_kd.errors import CacheError

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_MAX_K = 2**20
_MAX_POWER = 64


@dataclass(frozen=True)
class ResidualBin:
    """``num_elements`` residuals of ``element_bits`` bits, behind their common scale."""

    scale_dtype: str
    element_bits: int
    num_elements: int

    @property
    def packed_bytes(self) -> int:
        """Without the scale."""
        return -(-self.num_elements * self.element_bits // 8)


@dataclass(frozen=True)
class Compression:
    """``compression_config.yaml``; how values were chosen (``error_diffusion``) does not matter for reading them."""

    d: int
    k: int
    exact_k: int
    exact_dtype: str = "float32"
    polynomial_terms: tuple[int | str, ...] = ()
    term_dtype: str = "float32"
    residual_bins: tuple[ResidualBin, ...] = ()
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id_bits(self) -> int:
        """⌈log2 d⌉ in float32, as the writer computes it."""
        return max(int(np.ceil(np.log2(np.float32(self.d)))), 1)

    @property
    def id_bytes(self) -> int:
        """Of the k ids of a position."""
        return -(-self.k * self.id_bits // 8)

    @property
    def logprob_bytes(self) -> int:
        """Of the k log-probabilities of a position."""
        fixed = self.exact_k * _BYTES[self.exact_dtype] + len(self.polynomial_terms) * _BYTES[self.term_dtype]
        return fixed + sum(_BYTES[part.scale_dtype] + part.packed_bytes for part in self.residual_bins)

    @property
    def lossy(self) -> bool:
        """Whether log-probabilities are approximated, or added up from rounded differences."""
        return self.exact_k < self.k or self.delta_encoding


def read_compression(settings: Any, where: str) -> Compression:
    """Checks the content of ``compression_config.yaml``. Raises CacheError naming the key that is wrong."""
    if not isinstance(settings, dict):
        raise CacheError(f"{where} holds no settings of a compression")
    known = set(Compression.__dataclass_fields__) - {"settings"}
    if not settings.keys() <= known or not {"d", "k", "exact_k"} <= settings.keys():
        odd = sorted(map(str, settings.keys() - known)) or sorted({"d", "k", "exact_k"} - settings.keys())
        raise CacheError(f"{where} is not a compression that can be read: look at {', '.join(odd)}")
    values = {name: value for name, value in settings.items() if value is not None}
    for name in ("polynomial_terms", "residual_bins"):
        if not isinstance(values.get(name, []), list):
            raise CacheError(f"{where}: {name} is {values[name]!r}, must be a list")
    terms = tuple(values.get("polynomial_terms", []))
    bins = []
    for entry in values.get("residual_bins", []):
        if not isinstance(entry, dict) or entry.keys() != set(ResidualBin.__dataclass_fields__):
            raise CacheError(f"{where}: residual_bins need scale_dtype, element_bits and num_elements, not {entry!r}")
        bins.append(ResidualBin(**entry))
    found = Compression(**{**values, "polynomial_terms": terms, "residual_bins": tuple(bins), "settings": settings})
    _check(found, where)
    return found


def _check(found: Compression, where: str) -> None:
    def refuse(name: str, value: Any, wanted: str) -> None:
        raise CacheError(f"{where}: {name} is {value!r}, must be {wanted}")

    for name, least, most in (("d", 2, 2**31), ("k", 1, _MAX_K), ("exact_k", 0, _MAX_K)):
        if not _is_integer(getattr(found, name), least, most):
            refuse(name, getattr(found, name), f"an integer from {least} to {most}")
    if found.exact_k > found.k or found.k > found.d:
        refuse("k", found.k, f"at least exact_k {found.exact_k} and at most d {found.d}")
    for name in ("exact_dtype", "term_dtype"):
        if not _is_type(getattr(found, name)):
            refuse(name, getattr(found, name), f"one of {', '.join(_BYTES)}")
    for term in found.polynomial_terms:
        if not (isinstance(term, str) and term in ("sqrt", "exp")) and not _is_integer(term, 0, _MAX_POWER):
            refuse("polynomial_terms", term, f"sqrt, exp or a power from 0 to {_MAX_POWER}")
    for part in found.residual_bins:
        if not _is_type(part.scale_dtype):
            refuse("scale_dtype", part.scale_dtype, f"one of {', '.join(_BYTES)}")
        if not _is_integer(part.element_bits, 1, 64):
            refuse("element_bits", part.element_bits, "an integer from 1 to 64")
        if not _is_integer(part.num_elements, 1, found.k):
            refuse("num_elements", part.num_elements, f"an integer from 1 to k {found.k}")
    elements = sum(part.num_elements for part in found.residual_bins)
    if elements > found.k - found.exact_k:
        refuse("residual_bins", elements, f"at most k - exact_k = {found.k - found.exact_k} elements together")
    for name in ("delta_encoding", "normalize_t", "error_diffusion"):
        if not isinstance(getattr(found, name), bool):
            refuse(name, getattr(found, name), "true or false")


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and value in _BYTES


def _is_integer(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def decode_ids(packed: np.ndarray, compression: Compression) -> np.ndarray:
    """uint8 [P, id_bytes] → int64 [P, k]."""
    return unpack_bits(packed, compression.id_bits, compression.k).astype("i8")


def decode_logprobs(packed: np.ndarray, compression: Compression) -> np.ndarray:
    """uint8 [P, logprob_bytes] → float32 [P, k] (float64 where ``exact_dtype`` is), rounded to ``exact_dtype``."""
    exact_dtype, term_dtype = compression.exact_dtype, compression.term_dtype
    work = "f8" if "float64" in (exact_dtype, term_dtype) else "f4"
    values, offset = _take(packed, 0, exact_dtype, compression.exact_k)
    fitted = compression.k - compression.exact_k
    coefficients, offset = _take(packed, offset, term_dtype, len(compression.polynomial_terms))
    residual = np.zeros((len(packed), fitted), work)
    start = 0
    for part in compression.residual_bins:
        scale, offset = _take(packed, offset, part.scale_dtype, 1)
        numbers = unpack_bits(packed[:, offset : offset + part.packed_bytes], part.element_bits, part.num_elements)
        steps = numbers * 2.0 - 1.0 if part.element_bits == 1 else numbers - 2.0 ** (part.element_bits - 1)
        residual[:, start : start + part.num_elements] = steps.astype(work) * scale
        start, offset = start + part.num_elements, offset + part.packed_bytes
    approximated = _rounded(residual, exact_dtype)
    if compression.polynomial_terms:
        terms = _terms(compression, fitted)
        # The writer fits with products and sums that are rounded to the type of the coefficients.
        products = _rounded(terms[None] * coefficients[:, None, :], term_dtype)
        approximated = approximated + _rounded(products.sum(-1), term_dtype)
    logprobs = np.concatenate([values.astype(work), approximated.astype(work)], axis=1)
    if compression.delta_encoding:
        logprobs = np.cumsum(logprobs.astype("f4"), axis=1)
    return _rounded(logprobs, exact_dtype)


def _terms(compression: Compression, count: int) -> np.ndarray:
    """f_j(t): [count, terms] in ``term_dtype``."""
    dtype = compression.term_dtype
    work = "f8" if dtype == "float64" else "f4"
    t = _rounded(
        np.linspace(0, 1, count, dtype=work) if compression.normalize_t else np.arange(count, dtype=work), dtype
    )
    functions = {"sqrt": np.sqrt, "exp": np.exp}
    with np.errstate(over="ignore"):
        columns = [functions[term](t) if isinstance(term, str) else t**term for term in compression.polynomial_terms]
        return _rounded(np.stack(columns, -1), dtype)


def _take(packed: np.ndarray, offset: int, dtype: str, count: int) -> tuple[np.ndarray, int]:
    """``count`` little-endian numbers of every position as float32 (float64 stays), and the offset behind them."""
    end = offset + count * _BYTES[dtype]
    raw = np.ascontiguousarray(packed[:, offset:end])
    if dtype == "bfloat16":
        return from_patterns(raw.view("<u2"), dtype), end
    numbers = raw.view({"float16": "<f2", "float32": "<f4", "float64": "<f8"}[dtype])
    return numbers.astype("f8" if dtype == "float64" else "f4"), end


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 or float64 values as a type of the file can hold them."""
    if dtype in ("float32", "float64"):
        return values.astype("f4" if dtype == "float32" else "f8")
    return from_patterns(to_patterns(values, dtype), dtype).astype("f4")


def unpack_bits(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """uint8 [P, ⌈count·bits/8⌉] → uint64 [P, count], the most significant bit first."""
    stream = np.unpackbits(packed, axis=1, count=count * bits).reshape(len(packed), count, bits)
    numbers = np.zeros((len(packed), count), "u8")
    for bit in range(bits):
        numbers = (numbers << np.uint64(1)) | stream[:, :, bit]
    return numbers
