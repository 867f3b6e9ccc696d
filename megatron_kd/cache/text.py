"""What is read from files, as text that may be shown."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with whatever moves a cursor, changes colours or turns the direction of writing spelled out.

    A line break becomes ``\\n``, an escape ``\\x1b``; a backslash is doubled, so that the two cannot be confused.
    """
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)


def counted(number: int, thing: str) -> str:
    """A number of things: ``1 leftover``, ``2 leftovers``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def size_text(size: float) -> str:
    """Bytes in the unit that suits them: 1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
