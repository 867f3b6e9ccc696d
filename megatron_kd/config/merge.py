"""Merging the mappings of several files, remembering where each value came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_kd.errors import ConfigError

Key = tuple[str, ...]


class Whole(dict[str, Any]):
    """A mapping that stands for one thing, such as a named model.

    Laid over another mapping it replaces it; later mappings still merge into it.
    """


@dataclass
class Layered:
    """A nested mapping and the source (a file or an override) of each of its leaves."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[Key, str] = field(default_factory=dict)

    def merge(self, other: dict[str, Any], source: str, at: Key = ()) -> None:
        """Lays ``other`` over the mapping: mappings merge key by key, all else replaces, None resets to the default."""
        for name, value in other.items():
            self.set((*at, str(name)), value, source)

    def merge_layered(self, other: Layered, at: Key = ()) -> None:
        """Lays another layered mapping over this one and takes over the sources of its leaves."""
        self.merge(other.values, "", at)
        for key, source in other.sources.items():
            self.sources[(*at, *key)] = source

    def set(self, key: Key, value: Any, source: str) -> None:
        """Sets one value by its path of keys. Raises ConfigError where a key on the way is no section."""
        parent = self.values
        for depth, name in enumerate(key[:-1], start=1):
            child = parent.get(name)
            if child is None:
                child = parent[name] = {}
            if not isinstance(child, dict):
                place = ".".join(key[:depth])
                raise ConfigError(f"{source}: {'.'.join(key)} cannot be set, {place} is {child!r} and no section")
            parent = child
        name, old = key[-1], parent.get(key[-1])
        if isinstance(value, dict) and isinstance(old, dict) and not isinstance(value, Whole):
            self.merge(value, source, key)
            return
        self._forget(key)
        self.sources[key] = source
        if isinstance(value, dict):
            parent[name] = Whole() if isinstance(value, Whole) else {}
            self.merge(value, source, key)
        else:
            parent[name] = value  # None included: it marks the key as reset for the files that extend this one

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
