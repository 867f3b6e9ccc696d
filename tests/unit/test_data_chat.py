"""Conversations: what the template renders, which tokens are the assistant's, and lines that are refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.data.chat import ChatTokenizer
from megatron_kd.data.conversation import Conversation, conversation_of
from megatron_kd.data.prepare import prepare
from megatron_kd.data.tokenizer import load_tokenizer
from megatron_kd.errors import ConfigError, DataError
from tests.unit.data_tokenizers import bpe, write_folder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
# As templates that strip the thoughts of all turns but the last.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last %}{{ m.content }}{% else %}…{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICKY = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + CHATML
DEAF = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
TURNS = [
    ("system", "be brief"),
    ("user", "the cat"),
    ("assistant", "sat on the mat"),
    ("user", "dog"),
    ("assistant", "log"),
]


def messages(turns: list[tuple[str, str]] = TURNS) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def chat(folder: Path, template: str | None) -> ChatTokenizer:
    write_folder(folder, bpe())
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(load_tokenizer(folder))


def said_by(folder: Path, template: str, value: dict[str, Any]) -> tuple[str, list[str]]:
    """The whole text, and the runs of it that are learned."""
    tokenizer = chat(folder, template)
    (coded,) = tokenizer.encode_batch([conversation_of(value, "x:1")])
    decode = load_tokenizer(folder).decode
    runs: list[list[int]] = []
    before = False
    for token in coded.tolist():
        if token >= 0:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = token >= 0
    return decode([token if token >= 0 else ~token for token in coded.tolist()]), [decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_the_assistants_tokens_by_hand(tmp_path: Path, template: str) -> None:
    text, runs = said_by(tmp_path, template, messages())
    assert text == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in TURNS)
    assert runs == ["sat on the mat<|im_end|>", "log<|im_end|>"]


def test_a_conversation_that_the_assistant_begins(tmp_path: Path) -> None:
    _, runs = said_by(tmp_path, MARKED, messages([("assistant", "the cat sat")]))
    assert runs == ["the cat sat<|im_end|>"]


def test_the_rows_of_a_chat_corpus(tmp_path: Path) -> None:
    chat(tmp_path / "tokenizer", CHATML)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    lines = [messages([("user", f"the cat {i}"), ("assistant", f"the mat {i}")]) for i in range(40)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments: dict[str, Any] = {
        "corpus_format": "chat",
        "paths": [str(tmp_path)],
        "tokenizer": tokenizer,
        "seq_length": 64,
        "progress": False,
    }
    samples = prepare(**arguments, packing="documents", heldout_tokens=128, out_dir=tmp_path / "samples")
    found = []
    for i in range(len(samples)):
        tokens, mask = samples.tokens(i), samples.loss_mask(i)
        bounds = [*samples.document_offsets(i).tolist(), 64]
        for start, stop in pairwise(bounds):
            text = tokenizer.decode(tokens[start:stop])
            learned = [int(tokens[place + 1]) for place in range(start, stop) if mask[place]]
            if learned:
                assert text.startswith("<|im_start|>user\nthe cat ") and text.endswith("<|im_end|>\n")
                answer = tokenizer.decode(learned)
                assert answer == text.split("assistant\n")[1].removesuffix("\n")
                found.append(answer)
            else:
                assert set(tokens[start:stop]) == {tokenizer.eos_id}
    assert 30 < len(found) == len(set(found)) <= 40
    assert (
        samples.manifest["request"]["corpus"]["chat_template_sha256"]
        == ChatTokenizer(tokenizer).identity()["chat_template_sha256"]
    )
    with pytest.raises(ConfigError, match="conversations see each other: use documents or padded"):
        prepare(**arguments, out_dir=tmp_path / "other")
    chat(tmp_path / "tokenizer", MARKED)
    arguments["tokenizer"] = load_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(DataError, match="chat_template_sha256 is"):
        prepare(**arguments, packing="documents", heldout_tokens=128, out_dir=tmp_path / "samples")


def test_a_tokenizer_without_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no chat template, .* set data.tokenizer"):
        chat(tmp_path, None)


@pytest.mark.parametrize(
    ("template", "turns", "words"),
    [
        (FORGETFUL, TURNS, "renders message 3 differently when others follow"),
        (PICKY, TURNS, "refuses the conversation: begin with the user"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            TURNS,
            "renders nothing that the assistant says",
        ),
        ("{% generation %}{% endgeneration %}x", TURNS, "renders nothing that the assistant says"),
    ],
    ids=["forgetful", "picky", "silent", "empty"],
)
def test_templates_that_cannot_be_used(tmp_path: Path, template: str, turns: Any, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        chat(tmp_path, template).encode_batch([conversation_of(messages(turns), "x.jsonl:7")])
    assert str(caught.value).startswith("x.jsonl:7: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], 'has no "messages"'),
        ({"text": "x"}, 'has no "messages"'),
        ({"messages": []}, 'has no "messages"'),
        ({"messages": ["hello"]}, "message 1 has the role None"),
        (messages([("user", "a"), ("bot", "b")]), "message 2 has the role 'bot': use one of system, developer, user"),
        (messages([("user", "a"), ("assistant", " \n")]), "message 2: the assistant's content is empty"),
        (messages([("user", "a")]), "has no message of the assistant"),
        ({"messages": [{"role": "user"}]}, "message 1: its content is NoneType, not a string"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
        ({"messages": [{"role": "tool", "content": "x", "tool_calls": [1]}]}, "'tool_calls': only role and content"),
    ],
)
def test_lines_that_are_refused(value: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        conversation_of(value, "x.jsonl:7")
    assert words in str(caught.value) and str(caught.value).startswith("x.jsonl:7")


def test_conversations_are_told_apart_by_what_is_said() -> None:
    spoken = conversation_of(messages(), "x:1")
    assert spoken == Conversation(tuple(messages()["messages"]), "x:1")
    assert spoken.text == "the cat\n\nsat on the mat\n\ndog\n\nlog"
