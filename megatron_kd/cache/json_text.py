"""JSON of files that nobody vouches for."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """As ``json.loads``. Raises ValueError alone, for whatever the text may be."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
