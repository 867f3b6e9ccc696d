"""Published results of offline top-K distillation with a fused chunked KL (2026), as data, in the units as given."""

from __future__ import annotations

from dataclasses import dataclass

K = 1024
LOSS_HIDDEN, LOSS_VOCAB, LOSS_TOP_K = 4096, 128256, 100
"""The sizes of the loss alone: the output projection of an 8B model, bf16, on one H200."""


@dataclass(frozen=True)
class PublishedFigure:
    """What is published of one implementation of the loss alone at one token number.

    Attributes:
        peak_gib: inputs included; None where it is not published, or ran out of memory.
        time_over_fused: of an iteration.
    """

    implementation: str
    tokens: int
    peak_gib: float | None = None
    out_of_memory: bool = False
    time_over_fused: float | None = None


LOSS_ALONE = (
    PublishedFigure("dense", 32 * K, peak_gib=85.2),
    PublishedFigure("fused", 32 * K, peak_gib=5.45),
    *(PublishedFigure("dense", n * K, out_of_memory=True) for n in (64, 128, 256)),
    PublishedFigure("forward_chunked", 256 * K, peak_gib=134.2, time_over_fused=3.3),
    PublishedFigure("fused", 256 * K, peak_gib=11.6, time_over_fused=1.0),
)


@dataclass(frozen=True)
class PublishedRun:
    """A training run: seconds of an iteration, TFLOP/s a GPU, and on one GPU the peak in GB."""

    implementation: str
    mode: str
    gpus: int
    seconds: float
    tflops: float
    peak_gb: float | None = None


EIGHT_TO_THREE = (
    PublishedRun("dense", "online", 1, 25.9, 237.0, 102.8),
    PublishedRun("dense", "offline", 1, 18.5, 331.0, 78.3),
    PublishedRun("forward_chunked", "offline", 1, 18.4, 335.0, 61.8),
    PublishedRun("fused", "offline", 1, 20.2, 304.0, 58.3),
)
"""Llama 3.1 8B teaching a Llama of 3.2B on one H200, 8,192 tokens, top-100."""
GPT_OSS = (
    PublishedRun("dense", "online", 32, 57.0, 74.2),
    PublishedRun("fused", "offline", 8, 12.23, 345.7),
)
"""A student of the size of GPT-OSS 20B, taught by GPT-OSS 120B at 32,768 tokens, on H200."""
TEACHER_TENSOR_GB = 50.0
"""The 120B teacher's probabilities for 4 rows of 32,768 tokens in bf16."""
ITERATION_PEAK_GB = {"dense": 250.0, "fused": 128.0}
"""Of an iteration with that tensor."""
