"""Cached rows in words: the right text at the right position, ids where the tokenizer is another, no harm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache.commits import read_commit
from megatron_kd.cache.row import Row
from megatron_kd.cache.store import Cache, create_cache
from megatron_kd.cache.writer import write_shard
from megatron_kd.data.decoded_rows import CONTEXT, decode_rows, find_tokenizer
from megatron_kd.data.tokenizer import Tokenizer, load_tokenizer
from megatron_kd.errors import DataError
from tests.unit.cache_rows import folder_of, make_cache, make_manifest, make_row, rank_table, shards_folder
from tests.unit.data_tokenizers import TEXT, bpe, write_folder, write_gguf

V = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tok") / "letters", bpe(V))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture
def spoken(tmp_path: Path, tokenizer: Tokenizer) -> tuple[Cache, Row]:
    """One row of two documents of real text, each position's likeliest candidate being the true next token."""
    first, second = (tokenizer.encode(text) for text in TEXT)
    tokens = np.concatenate([first, second])
    row = make_row(0, len(tokens), vocab_size=V, unused=False)
    ids = row.ids.copy()
    for n, follows in enumerate(tokens[1:]):
        if follows in ids[n]:
            ids[n][ids[n] == follows] = ids[n, 0]
        ids[n, 0] = follows
    mask = np.ones(len(tokens), "u1")
    row = replace(
        row, tokens=tokens, ids=ids, loss_mask=mask, document_offsets=np.array([0, len(first)], "i4"), sample_id=0
    )
    manifest = make_manifest(1, 1, vocab_size=V, tokenizer=tokenizer.identity())
    cache = create_cache(tmp_path / "c", manifest, rank_table(V))
    write_shard(cache, 0, [row])
    return cache, row


def test_every_position_in_words(spoken: tuple[Cache, Row], tokenizer: Tokenizer) -> None:
    cache, row = spoken
    (decoded,) = decode_rows(folder_of(cache), [0], tokenizer, positions=len(row), candidates=3)
    assert (decoded.sample_id, decoded.length, decoded.documents, decoded.top_k) == (0, len(row), 2, 5)
    assert [at.position for at in decoded.positions] == list(range(len(row)))
    boundary = int(row.document_offsets[1])
    for n, at in enumerate(decoded.positions):
        text = TEXT[n >= boundary]
        context = at.context
        assert context and context in text
        start = 0 if n < boundary else boundary
        assert len(tokenizer.encode(context)) <= CONTEXT
        if n - start < CONTEXT:
            assert text.startswith(context), "no text of the document before"
        assert len(at.candidates) == 3
        assert [c.probability for c in at.candidates] == np.exp(row.logprobs[n, :3].astype("f8")).tolist()
        assert at.tail == pytest.approx(float(np.exp(row.tail_logmass[n])))
        if n + 1 in (boundary, len(row)):
            assert at.next_token is None
        else:
            assert at.next_token == at.candidates[0]
            assert at.next_token.text is not None and context + at.next_token.text in text
    assert json.loads(json.dumps(decoded.to_dict()))["positions"][0]["next_token"]["id"] == int(row.tokens[1])


def test_text(spoken: tuple[Cache, Row], tokenizer: Tokenizer) -> None:
    cache, row = spoken
    (decoded,) = decode_rows(folder_of(cache), [0], tokenizer, positions=3)
    text = decoded.text()
    assert text.startswith(f"sample 0: {len(row)} tokens, 2 documents\n  position ")
    assert len(decoded.positions) == 3 and text.count("→") == 3 and text.count("; outside the top 5 0.") == 3
    assert decoded.positions[0].position > 0 and decoded.positions[-1].position < len(row) - 1


def test_a_token_that_the_teacher_did_not_expect(tmp_path: Path) -> None:
    cache, rows = make_cache(tmp_path / "c", [60], 1)
    (decoded,) = decode_rows(folder_of(cache), [0], None, positions=100)
    assert [at.position for at in decoded.positions] == np.flatnonzero(rows[0].loss_mask).tolist()
    unexpected = 0
    for at in decoded.positions:
        n = at.position
        if at.next_token is None:
            continue
        where = np.flatnonzero(rows[0].ids[n] == rows[0].tokens[n + 1])
        if len(where):
            assert at.next_token.probability == float(np.exp(rows[0].logprobs[n, where[0]].astype("f8")))
        else:
            assert at.next_token.probability is None
            unexpected += 1
        assert all(candidate.id >= 0 for candidate in at.candidates), "unused slots are no candidates"
        assert at.next_token.text is None and at.context.split()[-1] == str(rows[0].tokens[n])
    assert unexpected > 5 and decoded.text().count("(not in the top 5)") == unexpected


def test_control_characters_are_harmless(tmp_path: Path, tokenizer: Tokenizer) -> None:
    evil = "\x1b[2J\x07[bold red]\u202etxt\r\n\\n"
    tokens = tokenizer.encode(evil)
    manifest = make_manifest(1, 1, vocab_size=V, tokenizer=tokenizer.identity())
    cache = create_cache(tmp_path / "c", manifest, rank_table(V))
    row = make_row(0, len(tokens), vocab_size=V)
    offsets = np.zeros(1, "i4")
    write_shard(
        cache, 0, [replace(row, tokens=tokens, loss_mask=np.ones_like(row.loss_mask), document_offsets=offsets)]
    )
    (decoded,) = decode_rows(folder_of(cache), [0], tokenizer, positions=1000)
    shown = decoded.text()
    assert all(map(str.isprintable, shown.split("\n")))
    assert shown.count("\n") == 2 * len(tokens)
    assert "\\x1b[2J\\x07[bold red]" in shown


def test_a_damaged_row_says_so_and_others_are_shown(tmp_path: Path) -> None:
    cache, _ = make_cache(tmp_path / "c", [300, 300], 1)
    file = shards_folder(cache) / read_commit(cache, 0).attempt / "rank" / "c.0.0"
    file.write_bytes(file.read_bytes()[:-9])
    broken, good = decode_rows(folder_of(cache), [0, 1], None)
    assert "sample 0 of" in broken.text() and "bytes, its commit record says" in broken.text()
    assert broken.positions == [] and len(good.positions) == 4


def test_the_tokenizer_must_be_the_same(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = {**tokenizer.identity(), "name": "mine/letters"}
    cache = tmp_path / "work" / "cache"
    found, why = find_tokenizer(identity, cache)
    assert found is None and "no tokenizer 'mine/letters' here, give it with --tokenizer" in why
    found, why = find_tokenizer(identity, cache, folder)
    assert found is not None and why == ""
    # A GGUF file of the same vocabulary is the same tokenizer.
    gguf = tmp_path / "same.gguf"
    write_gguf(gguf, bpe(V))
    found, why = find_tokenizer(identity, cache, gguf)
    assert found is not None and why == ""
    write_folder(tmp_path / "other", bpe(280))
    found, why = find_tokenizer(identity, cache, tmp_path / "other")
    assert found is None and why.endswith("other is another tokenizer than the cache's 'mine/letters'")
    with pytest.raises(DataError, match="no tokenizer at"):
        find_tokenizer(identity, cache, tmp_path / "nothing")
    # By its recorded name, beside the cache and in the working directory.
    write_folder(tmp_path / "work" / "mine" / "letters", bpe(V))
    assert find_tokenizer(identity, cache)[0] is not None
    monkeypatch.chdir(tmp_path / "work")
    assert find_tokenizer(identity, "elsewhere/cache")[0] is not None
    (tmp_path / "work" / "mine" / "letters" / "tokenizer.json").write_text("{")
    found, why = find_tokenizer(identity, cache)
    assert found is None and "no tokenizer can be loaded from" in why


@pytest.mark.parametrize("name", [None, "", 3, "/etc/letters", "../letters", "a/../../letters"])
def test_names_that_lead_elsewhere_are_not_followed(name: object, tmp_path: Path) -> None:
    write_folder(tmp_path / "letters", bpe(V))
    found, why = find_tokenizer({"name": name, "sha256": "12"}, tmp_path / "a" / "cache")
    assert found is None and "names no tokenizer" in why
