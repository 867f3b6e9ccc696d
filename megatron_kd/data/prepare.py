"""From a corpus to a set of samples, streaming; nothing is done where the same samples stand already."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from megatron_kd.data.chat import ChatTokenizer
from megatron_kd.data.conversation import Conversation, text_of
from megatron_kd.data.corpus import corpus_identity, read_conversations, read_documents
from megatron_kd.data.names import CorpusFormat, Packing, Truncation
from megatron_kd.data.packing import PackedRow
from megatron_kd.data.packing_rule import PackingRule
from megatron_kd.data.sample_writer import find_samples, sample_request, write_samples
from megatron_kd.data.samples import SampleSet
from megatron_kd.data.selection import MAX_OVERLAP, Advance, Choice, Encode, Scan, choose, scan
from megatron_kd.data.tokenizer import Tokenizer
from megatron_kd.errors import ConfigError, DataError
from megatron_kd.progress import progress as progress_bar

# A corpus is read no further than its budgets need, but a small one always as a whole: the documents of a prefix are
# not those of the corpus.
_LEAST_SCANNED_TOKENS = 2**20
_SCANNED_PER_HELDOUT = 16
SELECTION_VERSION = 1
PACKING_VERSION = 1


def prepare(
    *,
    corpus_format: CorpusFormat,
    paths: Sequence[str] = (),
    text_key: str = "text",
    tokenizer: Tokenizer,
    seq_length: int,
    packing: Packing = "concatenate",
    truncation: Truncation = "split",
    train_tokens: int | None = None,
    heldout_tokens: int | None = None,
    out_dir: str | Path,
    seed: int = 0,
    progress: bool = True,
) -> SampleSet:
    """Tokenises, splits, packs and writes a corpus.

    The split is by document (``selection.py``), both parts are packed in a pseudo-random order of documents. Beside
    ``out_dir`` about 4 bytes a token are needed for a while.

    Args:
        corpus_format, paths, text_key: as in ``read_documents``.
        seq_length: tokens in a row.
        packing, truncation: see ``PackingRule``.
        train_tokens: budget of the split ``train``, padding included, rounded down to whole rows; None takes the whole
            corpus.
        heldout_tokens: the same for the split ``heldout``; None holds nothing out.
        seed: of the choice and the order of documents.

    Returns:
        The samples, those of an earlier call with the same arguments and content if they are there.

    Raises:
        ConfigError: for a budget below one row, an unknown packing, or conversations that would see each other.
        DataError: for a tokenizer without the chat template that conversations need, for a corpus that cannot be read
            or is smaller than the budgets, and for other samples in ``out_dir``.
    """
    _check(seq_length, packing, truncation, train_tokens, heldout_tokens, seed)
    chat = ChatTokenizer(tokenizer) if corpus_format == "chat" else None
    if chat is not None and packing == "concatenate":
        raise ConfigError("data.packing concatenate would let conversations see each other: use documents or padded")
    rule = PackingRule(packing, seq_length, truncation, tokenizer.eos_id, adds_eos=chat is None)
    corpus = corpus_identity(corpus_format, paths, text_key)
    if chat is not None:
        corpus |= chat.identity()
    identities: dict[str, Any] = {
        "seq_length": seq_length,
        "packing": packing,
        "tokenizer_identity": tokenizer.identity(),
        "corpus_identity": corpus,
        "selection": {
            "version": SELECTION_VERSION,
            "seed": seed,
            "train_tokens": train_tokens,
            "heldout_tokens": heldout_tokens,
            "max_overlap": MAX_OVERLAP,
            **({} if packing == "concatenate" else {"truncation": truncation, "packing_version": PACKING_VERSION}),
        },
    }
    existing = find_samples(out_dir, sample_request(**identities))
    if existing is not None:
        return existing

    def read() -> Iterator[str | Conversation]:
        return read_documents(corpus_format, paths, text_key) if chat is None else read_conversations(paths)

    out_dir = Path(out_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    train_rows = None if train_tokens is None else train_tokens // seq_length
    heldout_rows = (heldout_tokens or 0) // seq_length
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.scan-") as folder:
        scanned, choice = _scan_enough(
            read,
            tokenizer.encode_batch if chat is None else chat.encode_batch,
            Path(folder),
            rule,
            seed=seed,
            train_tokens=None if train_rows is None else train_rows * seq_length,
            heldout_tokens=heldout_rows * seq_length,
            corpus_bytes=int(str(corpus["bytes"])),
            show=progress,
        )
        expected = heldout_rows + (_tokens(scanned, choice) // seq_length if train_rows is None else train_rows)
        with progress_bar("prepare: pack and write", max(expected, 1), unit="rows", enabled=progress) as advance:

            def rows(documents: Sequence[int], limit: int | None) -> Iterator[PackedRow]:
                for row in islice(rule.rows(scanned.documents(documents)), limit):
                    advance()
                    yield row

            splits = {"train": rows(choice.train.tolist(), train_rows)}
            if heldout_rows:
                splits["heldout"] = rows(choice.heldout.tolist(), heldout_rows)
            return write_samples(out_dir, splits, **identities)


def _check(
    seq_length: int, packing: str, truncation: str, train_tokens: int | None, heldout_tokens: int | None, seed: int
) -> None:
    for key, word, known in (("packing", packing, Packing), ("truncation", truncation, Truncation)):
        if word not in get_args(known):
            raise ConfigError(f"data.{key} {word!r} is unknown: choose one of {', '.join(get_args(known))}")
    if seq_length < 2:
        raise ConfigError(f"data.seq_length is {seq_length}: a row of fewer than 2 tokens has nothing to predict")
    if not 0 <= seed < 2**64:
        raise ConfigError(f"the seed must be from 0 to 2^64 − 1, not {seed}")
    for name, value in (("train_tokens", train_tokens), ("heldout_tokens", heldout_tokens)):
        if value is not None and value < seq_length:
            raise ConfigError(f"data.{name} {value} is less than one row of data.seq_length {seq_length}: raise it")


def _scan_enough(
    read: Callable[[], Iterator[str | Conversation]],
    encode: Encode,
    folder: Path,
    rule: PackingRule,
    *,
    seed: int,
    train_tokens: int | None,
    heldout_tokens: int,
    corpus_bytes: int,
    show: bool,
) -> tuple[Scan, Choice]:
    """Scans until both splits are full. Twice as far each time: what must be left out of train shows afterwards."""
    enough = None
    if train_tokens is not None:
        enough = max(train_tokens + _SCANNED_PER_HELDOUT * heldout_tokens, _LEAST_SCANNED_TOKENS)
    attempt = 0
    while True:
        file = folder / f"tokens-{attempt}.npy"
        with _bytes_bar("prepare: tokenise", corpus_bytes, show) as advance:
            scanned = scan(read(), encode, file, rule, seed=seed, enough=enough, advance=advance)
        try:
            with _bytes_bar("prepare: compare documents", corpus_bytes, show and heldout_tokens > 0) as advance:
                choice = choose(scanned, lambda: map(text_of, read()), heldout_tokens, advance)
            available = _tokens(scanned, choice)
            # Rows that are filled up with padding are rows as well, so fewer tokens than a row holds make one.
            least = rule.seq_length if rule.packing == "concatenate" else 1
            needed = least if train_tokens is None else train_tokens
            if available >= needed:
                return scanned, choice
            problem = DataError(
                f"the corpus has only {available} tokens for training beside the {heldout_tokens} held out, "
                f"{needed} are needed: lower data.train_tokens or data.seq_length, or add documents"
            )
        except DataError as error:
            problem = error
        if scanned.complete:
            raise problem
        assert enough is not None, "only a scan with a limit is incomplete"
        file.unlink()
        enough *= 2
        attempt += 1


def _tokens(scanned: Scan, choice: Choice) -> int:
    """Tokens for training, EOS included."""
    return int(scanned.packed_lengths[choice.train].sum())


@contextmanager
def _bytes_bar(description: str, corpus_bytes: int, show: bool) -> Iterator[Advance]:
    """Progress over the text of a corpus, held at the end where unpacked text is longer than its files."""
    left = total = max(corpus_bytes // 1024, 1)
    with progress_bar(description, total, unit="KiB", enabled=show) as advance:
        carried = 0

        def count(text: str) -> None:
            nonlocal left, carried
            units, carried = divmod(carried + len(text), 1024)
            units = min(units, left)
            if units:
                left -= units
                advance(units)

        yield count
