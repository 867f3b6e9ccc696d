"""Weights & Biases as a view of a run: it shows what ``metrics.jsonl`` holds and never stands in training's way."""

from __future__ import annotations

import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from megatron_kd.config import Recipe, dump_recipe
from megatron_kd.files import write_json

logger = logging.getLogger(__name__)

# The hosted service has two names and takes a login for either.
_HOSTED = {"api.wandb.ai", "api.forge.coreweave.com"}
# wandb's own variables, with our values where they are not set: what a silent server may cost a run in all.
_PATIENCE = {"WANDB_INIT_TIMEOUT": "30", "WANDB_FINISH_TIMEOUT": "60", "WANDB_FINISH_TIMEOUT_RAISES": "true"}


class WandbView:
    """One wandb run per run directory, across restarts; offline where no login or no server is there.

    WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT (seconds) say how long a silent server may hold up start and end.
    """

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        """Never raises for the network's or the account's sake: it goes offline and says so in the log.

        The configuration of the run is the resolved recipe, section by section, and ``environment``: the versions, the
        git revision and the hardware that the run directory has in environment.json.
        """
        settings = recipe.logging.wandb
        assert settings is not None
        self._run: Any = None
        self._folder = run_dir / "wandb"
        if settings.mode == "disabled":
            return
        os.environ.setdefault("WANDB_SILENT", "true")
        for variable, value in _PATIENCE.items():
            os.environ.setdefault(variable, value)
        import wandb

        mode = settings.mode
        if mode == "online" and not has_login():
            logger.warning("wandb: no login found, writing offline; later: wandb login; %s", _sync_line(run_dir))
            mode = "offline"
        arguments: dict[str, Any] = {
            "project": settings.project,
            "group": settings.group,
            "entity": settings.entity,
            "name": recipe.name,
            "job_type": recipe.teacher.mode,
            "id": _run_id(run_dir),
            "resume": "allow",
            "dir": str(run_dir),
            "config": {**yaml.safe_load(dump_recipe(recipe)), "environment": _environment(run_dir)},
        }
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                self._run = wandb.init(mode=attempt, settings=wandb.Settings(console="off"), **arguments)
                self._folder = Path(self._run.settings.sync_dir)
                # Everything is drawn over tokens, so that runs with other batch sizes lie over each other.
                self._run.define_metric("tokens")
                self._run.define_metric("*", step_metric="tokens")
                return
            except Exception as error:
                reason = " ".join(str(error).split())
                if attempt == "offline":
                    logger.warning("wandb cannot be used (%s); training goes on, metrics.jsonl has everything", reason)
                    return
                logger.warning("wandb cannot be reached (%s), writing offline; later: %s", reason, _sync_line(run_dir))
                # Its service still holds the run's id after a failed start and would refuse it to the next one.
                wandb.teardown()

    def log(self, record: dict[str, Any]) -> None:
        """One line of metrics."""
        if self._run is not None:
            try:
                self._run.log(record)
            except Exception as error:
                self._lost(error)

    def finish(self, *, failed: bool) -> None:
        """Closes the run; gives up on a server that does not answer."""
        if self._run is not None:
            try:
                self._run.finish(exit_code=int(failed))
            except Exception as error:
                self._lost(error)

    def _lost(self, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning("wandb was lost (%s); metrics.jsonl has everything; later: wandb sync %s", reason, self._folder)
        self._run = None
        import wandb

        # Otherwise its hook at the interpreter's exit meets the same dead service and prints a traceback.
        try:
            wandb.teardown()
        except Exception as teardown_error:
            logger.warning("wandb's service did not end cleanly (%s)", teardown_error)


def _sync_line(run_dir: Path) -> str:
    return f"wandb sync {run_dir}/wandb/offline-run-*"


def default_server() -> str:
    """The server that wandb talks to: of WANDB_BASE_URL, of ``wandb login --host``, or the hosted one."""
    import wandb

    return str(wandb.setup().settings.base_url).rstrip("/")


def has_login(server: str | None = None) -> bool:
    """Whether a key for a server is at hand, by default for ``default_server()``."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    host = urlsplit(server or default_server()).netloc
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
        return any(known.authenticators(name) for name in (_HOSTED if host in _HOSTED else {host}))
    except (OSError, netrc.NetrcParseError):
        return False


def _environment(run_dir: Path) -> Any:
    file = run_dir / "environment.json"
    return json.loads(file.read_text()) if file.exists() else None


def _run_id(run_dir: Path) -> str:
    """The id kept in the run directory, so that a restarted job continues the same wandb run."""
    file = run_dir / "wandb_run.json"
    if not file.exists():
        write_json(file, {"id": secrets.token_hex(4)})
    return str(json.loads(file.read_text())["id"])
