"""Whether the wandb mode of a recipe can work here."""

from __future__ import annotations

import importlib.util
import os
import urllib.error
import urllib.request

from megatron_kd.config import Recipe
from megatron_kd.doctor.check import Check, fail, not_needed, ok, warn
from megatron_kd.training.wandb_view import has_login

_TIMEOUT_S = 5.0


def check_wandb(recipe: Recipe | None) -> Check:
    """Judges package, mode, login and, online, whether the server answers."""
    settings = None if recipe is None else recipe.logging.wandb
    mode = None if settings is None else settings.mode
    if settings is None or mode == "disabled":
        why = "no recipe" if recipe is None else "logging.wandb is not set" if settings is None else "it is disabled"
        return not_needed("wandb", why)
    if importlib.util.find_spec("wandb") is None:
        return fail("wandb", "not installed", "pip install wandb, or set logging.wandb to null")
    if mode == "offline":
        return ok("wandb", "offline: files in run_dir, for wandb sync")
    if not has_login():
        return warn(
            "wandb",
            f"mode is {mode}, but nobody is logged in: the run will go offline",
            "wandb login, or set WANDB_API_KEY",
        )
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    try:
        urllib.request.urlopen(f"{server}/healthz", timeout=_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        return warn(
            "wandb",
            f"{server} does not answer ({error}): the run will go offline",
            "open the way to it, or set logging.wandb.mode=offline and wandb sync later",
        )
    return ok("wandb", f"online: logged in, {server} answers")
