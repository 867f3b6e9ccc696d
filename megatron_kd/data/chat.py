"""Conversations to tokens by the tokenizer's chat template, and which of them the assistant said.

A template that marks generations (``{% generation %}``) says so itself. Of others the conversation is rendered up to
each answer and with it: what was added is the answer. That holds only where each rendering is the beginning of the
next, which is checked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from megatron_kd.data.conversation import Conversation
from megatron_kd.data.tokenizer import Tokenizer
from megatron_kd.errors import DataError

RENDERING_VERSION = 1

Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens [n], and which of them the assistant said."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTokenizer:
    """A tokenizer's chat template: conversations in, tokens out, those that are not to be learned complemented."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises DataError where the tokenizer has no chat template."""
        self._transformers: Any = tokenizer.transformers
        self._name = tokenizer.name
        try:
            self._template = str(self._transformers.get_chat_template())
        except ValueError as error:
            raise DataError(
                f"the tokenizer {tokenizer.name!r} has no chat template, which corpus format chat needs: set "
                "data.tokenizer to a folder of the same tokens that has one (chat_template.jinja)"
            ) from error
        self._marks_generations = _GENERATION.search(self._template) is not None

    def identity(self) -> dict[str, Any]:
        """What decides the tokens of a conversation beyond the tokenizer."""
        return {
            "rendering": RENDERING_VERSION,
            "chat_template_sha256": hashlib.sha256(self._template.encode()).hexdigest(),
        }

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[NDArray[np.int32]]:
        """Tokens int32 [n] of each, ``~id`` where the assistant did not say it.

        The answer includes the mark that ends it; without generation marks, not the white space behind that, and a
        token belongs to where its first character stands.

        Raises:
            DataError: naming file and line, for a conversation that the template refuses, or one that it renders so
                that answers cannot be found.
        """
        encode = self._by_marks if self._marks_generations else self._by_prefixes
        found = []
        for conversation in conversations:
            ids, said = encode(list(conversation.messages), conversation.place)
            if not said.any():
                raise DataError(
                    f"{conversation.place}: the chat template of {self._name!r} renders nothing that the assistant "
                    "says: correct the template"
                )
            found.append(np.where(said, ids, ~ids).astype(np.int32))
        return found

    def _by_marks(self, messages: list[dict[str, str]], place: str) -> Encoded:
        encoded = self._template_of(messages, place, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return np.array(encoded["input_ids"], np.int32), np.array(encoded["assistant_masks"], bool)

    def _by_prefixes(self, messages: list[dict[str, str]], place: str) -> Encoded:
        whole = self._template_of(messages, place, tokenize=False)
        encoding = self._transformers.backend_tokenizer.encode(whole, add_special_tokens=False)
        begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
        said = np.zeros(len(begins), bool)
        for start, stop in self._answers(whole, messages, place):
            said |= (begins >= start) & (begins < stop)
        return np.array(encoding.ids, np.int32), said

    def _answers(self, whole: str, messages: list[dict[str, str]], place: str) -> Iterator[tuple[int, int]]:
        """From where to where in the text the assistant speaks."""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = ""
            if i:
                before = self._template_of(messages[:i], place, tokenize=False, add_generation_prompt=True)
            after = self._template_of(messages[: i + 1], place, tokenize=False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    f"{place}: the chat template of {self._name!r} renders message {i + 1} differently when others "
                    "follow it or its turn is opened, so that the assistant's tokens cannot be told: mark them in the "
                    "template with {% generation %}, or keep one answer a conversation"
                )
            yield len(before), len(after.rstrip())

    def _template_of(self, messages: list[dict[str, str]], place: str, **options: Any) -> Any:
        try:
            return self._transformers.apply_chat_template(messages, **options)
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(
                f"{place}: the chat template of {self._name!r} refuses the conversation: {' '.join(str(error).split())}"
            ) from error
