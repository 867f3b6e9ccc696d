"""What is asked of this environment: a recipe, or without one what the machine looks like."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import Recipe
from megatron_kd.config.layout import SINK_FAMILIES


@dataclass(frozen=True)
class Target:
    """What the checks hold the environment against.

    Attributes:
        recipe: None where nothing but the installation is looked at.
        gpu: ``cluster.gpu`` of the recipe; without one ``cpu``, or ``any`` where a GPU is seen.
        world: ranks that were started.
    """

    recipe: Recipe | None
    gpu: str
    world: int = 1

    @property
    def wants_gpu(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.gpu != "cpu"

    @property
    def why_cpu(self) -> str:
        """Why what only GPUs need is not needed."""
        return "cluster.gpu is cpu" if self.recipe is not None else "no GPU is seen"

    @property
    def gpus_per_node(self) -> int:
        """GPUs that a node must show; at least one without a recipe."""
        return 1 if self.recipe is None else self.recipe.cluster.gpus_per_node

    @property
    def ranks(self) -> int:
        """Ranks that a run will have: more than were started where the doctor came alone."""
        return self.world if self.recipe is None else max(self.world, self.recipe.world_size)

    @property
    def has_sinks(self) -> bool:
        """Whether a model has attention sinks."""
        models = () if self.recipe is None else (self.recipe.teacher.model, self.recipe.student.model)
        return any(model.family in SINK_FAMILIES for model in models)
