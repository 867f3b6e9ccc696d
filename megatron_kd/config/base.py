"""What every section of a recipe shares: strictness, and paths with environment variables."""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

_VARIABLE = re.compile(r"\$\{([^}]*)\}")


class Section(BaseModel):
    """A part of a recipe: unknown keys and loose types are refused, values do not change after loading.

    ``model_copy(update=...)`` makes a changed copy but does not check it again; ``load_recipe`` with overrides does.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def expand_variables(text: str) -> str:
    """Replaces every ``${NAME}`` by that environment variable. Raises ValueError where it is not set."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            raise ValueError(
                f"the environment variable {name!r} in {text!r} is not set: export it or write the path out"
            )
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def _path(text: str) -> str:
    if not text.strip():
        raise ValueError("a path must not be empty: leave the key out or set it to null")
    return expand_variables(text)


PathString = Annotated[str, AfterValidator(_path)]
"""A path, absolute or relative to the current directory; ``${NAME}`` stands for an environment variable."""
