"""Packed rows taken apart into their documents, for models that know nothing of packing. b rows, s positions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def document_spans(documents: Tensor) -> list[tuple[int, int, int]]:
    """Row, start and stop of each document, in their order; copies ``documents``, integers [b, s], to the host."""
    spans = []
    for row, numbers in enumerate(documents.cpu()):
        ends = (numbers[1:] != numbers[:-1]).nonzero().flatten() + 1
        bounds = [0, *ends.tolist(), len(numbers)]
        spans += [(row, start, stop) for start, stop in pairwise(bounds)]
    return spans


def documents_apart(model: Callable[[Tensor], Tensor], tokens: Tensor, documents: Tensor) -> Tensor:
    """What a causal model answers for each document alone, put back in place: [s, b, …].

    Documents of like lengths go together, filled up behind their ends, where a causal model looks from no token that
    counts; the portions are no larger than ``tokens``.

    Args:
        model: int64 [b', s'] → [s', b', …].
        tokens: int64 [b, s].
        documents: integers [b, s], unlike in neighbouring documents.
    """
    answers: Tensor | None = None
    for portion in portions(document_spans(documents), tokens.numel()):
        together = pad_sequence([tokens[row, start:stop] for row, start, stop in portion], batch_first=True)
        found = model(together)
        if answers is None:
            answers = found.new_empty((tokens.shape[1], tokens.shape[0], *found.shape[2:]))
        for j, (row, start, stop) in enumerate(portion):
            answers[start:stop, row] = found[: stop - start, j]
    assert answers is not None, "there is a row, and a row has a document"
    return answers


def portions(spans: list[tuple[int, int, int]], most: int) -> list[list[tuple[int, int, int]]]:
    """Documents that are run together, longest first: each portion at most ``most`` positions once filled up."""
    found: list[list[tuple[int, int, int]]] = []
    width = 0
    for span in sorted(spans, key=lambda span: span[1] - span[2]):
        length = span[2] - span[1]
        if not found or (len(found[-1]) + 1) * width > most:
            found.append([])
            width = length
        found[-1].append(span)
    return found
