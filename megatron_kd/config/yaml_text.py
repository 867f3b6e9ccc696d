"""YAML as recipes use it: no duplicate keys, ``1e-5`` is a number, errors name the file and line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_kd.errors import ConfigError


class _RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader made strict on duplicate keys and generous on floats."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            line = key_node.start_mark.line + 1
            if key in seen and key != "<<":
                problem = f"the key {key!r} stands twice (lines {seen[key]} and {line}): keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen[key] = line
        return super().construct_mapping(node, deep)


# YAML 1.1 (PyYAML) wants a dot and a signed exponent in a float, and so reads 1e-5 as text; YAML 1.2 does not.
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """Parses one YAML document. Raises ConfigError, naming ``source``, where it is not valid."""
    try:
        return yaml.load(text, _RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}, line {mark.line + 1}" if mark is not None else source
        raise ConfigError(f"{where}: {error.problem or error.context or 'not valid YAML'}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def read_mapping(path: Path, asked_by: str = "") -> dict[str, Any]:
    """Reads a YAML file that holds a mapping; an empty file is an empty one.

    Args:
        asked_by: who named the file, for the message when it is missing.

    Raises:
        ConfigError: when it is missing, unreadable, not YAML or no mapping.
    """
    reason = f" ({asked_by})" if asked_by else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{reason}: check the path") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder{reason}: give the YAML file itself") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text file in UTF-8{reason}: give a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read{reason}: {error.strerror}: check the path") from None
    value = parse_yaml(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold keys and values, not a {type(value).__name__}")
    return value


def to_yaml(value: Any) -> str:
    """Block-style YAML in the given order of keys; lists of scalars stay on one line."""
    return yaml.dump(value, Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


class _RecipeDumper(yaml.SafeDumper):
    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        items = list(sequence)
        return super().represent_sequence(tag, items, not any(isinstance(item, (dict, list)) for item in items))
