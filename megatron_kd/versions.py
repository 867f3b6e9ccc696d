"""Versions of what is installed, for the record of a run or a cache."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_versions(*names: str) -> dict[str, str]:
    """The version of each distribution; one that was not installed by a package manager is "unknown"."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
