"""Merging the mappings of several files, remembering where each value came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, ...]


class Whole(dict[str, Any]):
    """A mapping that stands for one thing, such as a named model.

    Laid over another mapping it replaces it; later mappings still merge into it. ``sources`` has where its own leaves
    came from, which says more than the place that named it.
    """

    def __init__(self, values: dict[str, Any], sources: dict[Key, str] | None = None) -> None:
        super().__init__(values)
        self.sources = sources or {}


@dataclass
class Layered:
    """A nested mapping and the source (a file or an override) of each of its leaves."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[Key, str] = field(default_factory=dict)

    def merge(self, other: dict[str, Any], source: str) -> None:
        """Lays ``other`` over the mapping: mappings merge key by key, everything else replaces.

        None replaces too: it stays as the mark of a reset (see ``without_resets``).
        """
        self._merge(self.values, other, source, ())

    def merge_layered(self, other: Layered) -> None:
        """Lays another layered mapping over this one and takes over the sources of its leaves."""
        self.merge(other.values, "")
        self.sources.update(other.sources)

    def _merge(self, into: dict[str, Any], other: dict[str, Any], source: str, at: Key) -> None:
        for name, value in ((str(name), value) for name, value in other.items()):
            key, old = (*at, name), into.get(name)
            if isinstance(value, dict) and isinstance(old, dict) and not isinstance(value, Whole):
                self._merge(old, value, source, key)
                continue
            self._forget(key)
            self.sources[key] = source
            into[name] = value
            if isinstance(value, dict):
                into[name] = Whole({}) if isinstance(value, Whole) else {}
                self._merge(into[name], value, source, key)
            if isinstance(value, Whole):
                self.sources.update({(*key, *inner): place for inner, place in value.sources.items()})

    def get(self, key: Key) -> Any:
        """The value at a path of keys, None where there is none."""
        value: Any = self.values
        for name in key:
            if not isinstance(value, dict):
                return None
            value = value.get(name)
        return value

    def source(self, key: Key, default: str) -> str:
        """Where the value at a path came from, or the nearest section around it."""
        for length in range(len(key), 0, -1):
            if source := self.sources.get(key[:length]):
                return source
        return default

    def _forget(self, key: Key) -> None:
        for other in [other for other in self.sources if other[: len(key)] == key]:
            del self.sources[other]


def without_resets(values: dict[str, Any]) -> dict[str, Any]:
    """A copy without the keys whose value is None, so that their defaults apply."""
    return {
        name: without_resets(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value is not None
    }
