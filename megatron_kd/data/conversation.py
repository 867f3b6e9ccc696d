"""Conversations of a ``chat`` corpus: messages with a role and a text, checked where they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_kd.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True)
class Conversation:
    """Messages in their order, each with ``role`` and ``content``, and where they were read."""

    messages: tuple[dict[str, str], ...]
    place: str

    @property
    def text(self) -> str:
        """What it says, without instructions, which many conversations share: by this it is told from others."""
        return "\n\n".join(m["content"] for m in self.messages if m["role"] not in INSTRUCTIONS)


def conversation_of(value: Any, place: str) -> Conversation:
    """A conversation from a JSON value {"messages": [{"role": …, "content": …}, …], …}.

    Args:
        place: file and line, for messages.

    Raises:
        DataError: no messages, one that is no object with a known role and a text, one with more that a template might
            render (``tool_calls``), an empty answer of the assistant, or none at all.
    """
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{place} has no "messages", a list of objects with role and content: correct the line')
    read = tuple(_message(message, f"{place}: message {number}") for number, message in enumerate(messages, 1))
    if not any(message["role"] == "assistant" for message in read):
        raise DataError(f"{place} has no message of the assistant, so nothing to train on: remove the line")
    return Conversation(read, place)


def _message(value: Any, place: str) -> dict[str, str]:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        role = value.get("role") if isinstance(value, dict) else None
        raise DataError(f"{place} has the role {role!r}: use one of {', '.join(ROLES)}")
    more = sorted(key for key, held in value.items() if key not in ("role", "content") and held is not None)
    if more:
        names = ", ".join(map(repr, more))
        raise DataError(f"{place} has {names}: only role and content are rendered, remove the rest")
    content = checked_text(value.get("content"), f"{place}: its content")
    if value["role"] == "assistant" and not content.strip():
        raise DataError(f"{place}: the assistant's content is empty: remove the message or the line")
    return {"role": value["role"], "content": content}


def checked_text(text: Any, what: str) -> str:
    """The text. Raises DataError, beginning with ``what``, for what is none or is not valid Unicode."""
    if not isinstance(text, str):
        raise DataError(f"{what} is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an escaped half of a surrogate pair
        raise DataError(f"{what} is not valid Unicode: {error}") from error
    return text


def text_of(document: str | Conversation) -> str:
    """The text by which a document is told from others."""
    return document if isinstance(document, str) else document.text
