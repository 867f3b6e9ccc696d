"""What layouts change, as tests measure it; ``python -m tests.layouts_table`` prints it as docs/measurements.md has it.

``pytest tests/distributed/test_layouts.py tests/distributed/test_training_layout_changes.py`` measures anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from tests.assets import ROOT
from tests.training_runs import Layout

FOLDER = ROOT / "build" / "layouts"
PARTS = {
    "steps": ("layout", "model", "loss", "gradient norm", "parameters"),
    "resumed": ("saved at → goes on at", "model", "loss", "gradient norm"),
}
Row = tuple[str, str]
"""Layout and model."""


def short(layout: Layout) -> str:
    """What a layout splits, without sizes of 1: ``TP 2 + SP, PP 2``."""
    parts = [part for part in str(layout).split(", ") if not part.endswith(" 1")]
    return ", ".join(["1 rank", *parts] if layout.world == 1 else parts)


def write(part: str, figures: Mapping[Row, tuple[float, ...]]) -> None:
    """Keeps relative differences, in the order of the columns."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [[*row, *values] for row, values in figures.items()]
    (FOLDER / f"{part}.json").write_text(json.dumps(rows))


def markdown(part: str) -> str:
    """A table, layouts in the order of the tests, the models of one beneath each other."""
    columns = PARTS[part]
    rows = [
        f"| {layout} | {model} | {' | '.join(f'{value:.0e}' for value in values)} |"
        for layout, model, *values in json.loads((FOLDER / f"{part}.json").read_text())
    ]
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


if __name__ == "__main__":
    missing = [part for part in PARTS if not (FOLDER / f"{part}.json").exists()]
    if missing:
        sys.exit(f"no figures under {FOLDER} for {' and '.join(missing)}: run the two tests first")
    print("\n\n".join(map(markdown, PARTS)))
