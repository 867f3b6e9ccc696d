"""Reading a run from a wandb server, by its address."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from megatron_kd.errors import KDError
from megatron_kd.report.runs import RunRecord, run_of_records
from megatron_kd.training.wandb_view import default_server, has_login

TIMEOUT_S = 15
"""For one answer of the server; a reading asks twice before it knows that the run is there."""
FORM = "wandb://entity/project/run_id or https://wandb.ai/entity/project/runs/run_id"


@dataclass(frozen=True)
class Address:
    """A run on a server. ``server`` is the address of its interface."""

    server: str
    entity: str
    project: str
    run: str

    @property
    def path(self) -> str:
        return f"{self.entity}/{self.project}/{self.run}"


def is_address(text: str) -> bool:
    """Whether an argument is meant as an address, not as a path."""
    return text.startswith(("wandb:", "http://", "https://"))


def parse_address(text: str) -> Address:
    """Raises KDError where it is not the address of a run."""
    parts = urlsplit(text)
    names = [unquote(name) for name in f"{parts.netloc}{parts.path}".split("/") if name]
    if parts.scheme == "wandb" and len(names) == 3:
        return Address(default_server(), *names)
    if parts.scheme in ("http", "https") and "runs" in names[3:-1]:
        at = names.index("runs", 3)
        # The hosted service has its interface on another host than its pages.
        host = f"api.{parts.netloc}" if parts.netloc in ("wandb.ai", "forge.coreweave.com") else parts.netloc
        return Address(f"{parts.scheme}://{host}", names[at - 2], names[at - 1], names[at + 1])
    raise KDError(f"{text}: not the address of a run on wandb: write {FORM}")


def read_from_server(text: str) -> RunRecord:
    """All that a run logged.

    Raises:
        KDError: the address is none, there is no login, the server does not answer, or has no such run.
    """
    address = parse_address(text)
    if not has_login(address.server):
        raise KDError(f"{text}: no login for {address.server}: run `wandb login`, or set WANDB_API_KEY")
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    try:
        api = wandb.Api(overrides={"base_url": address.server}, timeout=TIMEOUT_S)
        run = api.run(address.path)
        config = _configuration(run.config)
        rows = [dict(row) for row in run.scan_history(use_cache=False)]
    except Exception as error:
        raise KDError(
            f"{text}: cannot be read from {address.server} ({reason_of(error)}): check address, login and network, or "
            "give the run directory"
        ) from None
    rows.sort(key=lambda row: row.get("_step") or 0)
    return run_of_records(text, address.run, config, rows)


def reason_of(error: Exception) -> str:
    """What went wrong with a server, in a few words."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"no answer in {TIMEOUT_S} s" if "did not respond in time" in text else text[:300]


def _configuration(config: Any) -> dict[str, Any]:
    """The nested configuration as plain values; a server of another version hands it over as text."""
    if isinstance(config, str):
        config = json.loads(config)
    return {key: value for key, value in dict(config).items() if not key.startswith("_")}
