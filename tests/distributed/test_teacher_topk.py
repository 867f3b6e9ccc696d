"""Top-K extraction over a sharded head equals the extraction over the whole one."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from megatron_kd.teacher.topk import ExtractedTopK, extract_top_k
from megatron_kd.testing import run_distributed
from tests.unit.test_teacher_topk import check, whole_numbers

# Rows of a shard, vocabulary, K: an even split, K above a shard, a shard that is all padding, and all of it kept.
CASES = [(30, 0, 10), (8, 2, 25), (20, 25, 40), (10, 12, 15), (3, 3, 5)]


def sharded_rank(rank: int, world: int) -> list[list[torch.Tensor]]:
    """Everything extracted in each case, checked against the float64 oracle, and equal to one rank's."""
    results = []
    for tp in (2, 4):
        group = [dist.new_group(list(range(first, first + tp))) for first in range(0, world, tp)][rank // tp]
        for rows, padding, wanted in CASES:
            generator = torch.Generator().manual_seed(rows)
            vocab = rows * tp - padding
            top_k = min(wanted, vocab)
            hidden = torch.randn(9, 6, generator=generator)
            head = torch.randn(rows * tp, 6, generator=generator)
            head[vocab:] = 50.0
            head[vocab // 2 : vocab // 2 + 4] = head[0]  # ties, over the border of two shards
            start = rank % tp * rows
            got = extract_top_k(
                hidden,
                head[start : start + rows],
                top_k,
                vocab_size=vocab,
                vocab_start=start,
                temperature=2.0,
                extra_temperatures=(1.0,),
                group=group,
                chunk_bytes=4 * rows * 4,
            )
            check(got, hidden, head[:vocab], 2.0, atol=5e-5)
            alone = extract_top_k(hidden, head, top_k, vocab_size=vocab, temperature=2.0)
            assert torch.equal(got.targets.ids, alone.targets.ids), (tp, rows, padding)
            results.append(parts(got))
    return results


def parts(got: ExtractedTopK) -> list[torch.Tensor]:
    """All tensors of an extraction."""
    targets = got.targets
    return [targets.ids, targets.logprobs, targets.tail_logmass, *got.log_normalizers[1.0]]


def test_shards_give_the_whole_answer_on_every_rank() -> None:
    first, *others = run_distributed(sharded_rank, 4)
    assert len(first) == 2 * len(CASES)
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def layout_rank(rank: int, world: int) -> list[bool]:
    """Whether what is extracted at tensor parallelism 2 and 3 equals, bit for bit, what one rank extracts."""
    groups = {tp: dist.new_group(list(range(tp))) for tp in (2, 3)}
    same = []
    cases = ((768, 5, 300, None), (768, 300, 300, None), (3840, 20, 9, 0.1), (3100, 7, 4000, None), (3100, 9, 999, 5.0))
    for vocab, top_k, levels, softcap in cases:
        hidden, head = whole_numbers(11, 3840, levels, seed=vocab)
        padded = 768 if vocab == 768 else 3840  # shards of 64 columns or a multiple
        head = head[:padded] / 256
        extract = partial(
            extract_top_k,
            hidden,
            top_k=top_k,
            vocab_size=vocab,
            temperature=1.5,
            extra_temperatures=(1.0, 3.0),
            logit_softcap=softcap,
        )
        alone = extract(head)
        for tp, group in groups.items():
            if rank < tp:
                start, rows = rank * padded // tp, padded // tp
                got = extract(head[start : start + rows], vocab_start=start, group=group, chunk_bytes=1)
                same += [torch.equal(a, b) for a, b in zip(parts(got), parts(alone), strict=True)]
    return same


def test_the_layout_leaves_no_trace_in_the_bits() -> None:
    """Of exact logits: what a GEMM rounds depends on the shape of the shard."""
    first, second, third = run_distributed(layout_rank, 3)
    assert len(first) == len(second) == 2 * len(third) == 2 * 5 * 5
    assert all(first) and all(second) and all(third)
