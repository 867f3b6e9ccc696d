"""Which activations are kept and which are computed again in the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import Recipe


@dataclass(frozen=True)
class Recomputation:
    """Megatron-Core's settings of activation recomputation.

    Attributes:
        granularity: None, ``selective`` (parts of every layer) or ``full`` (whole layers).
        method: of full: ``uniform`` keeps the input of every group of layers, ``block`` recomputes the first layers of
            a stage and keeps all of the others.
        num_layers: of a group, or of those that are recomputed.
        modules: what selective recomputes.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int = 1
    modules: tuple[str, ...] = ()

    @staticmethod
    def of(recipe: Recipe) -> Recomputation:
        """From ``training.recompute_*``."""
        settings = recipe.training
        if settings.recompute_granularity is None:
            return Recomputation()
        return Recomputation(
            settings.recompute_granularity,
            settings.recompute_method,
            settings.recompute_num_layers or 1,
            tuple(settings.recompute_modules or ()),
        )

    def kept_layers(self, layers: int) -> int:
        """Layers of a stage whose activations are all kept."""
        if self.granularity != "full":
            return layers
        return max(layers - self.num_layers, 0) if self.method == "block" else 0

    def kept_inputs(self, layers: int) -> int:
        """Inputs of recomputed layers that are kept."""
        if self.granularity != "full":
            return 0
        if self.method == "block":
            return min(self.num_layers, layers)
        return -(-layers // self.num_layers)

    def at_once(self, layers: int) -> int:
        """Layers whose activations exist anew at once while they are recomputed."""
        if self.granularity != "full":
            return 0
        return 1 if self.method == "block" else min(self.num_layers, layers)

    def recomputes(self, module: str) -> bool:
        """Whether a part of every layer is computed twice."""
        return module in self.modules

    def repeated_share(self, layers: int) -> float:
        """Of a stage's layers the share whose forward pass runs twice."""
        return (layers - self.kept_layers(layers)) / layers if self.granularity == "full" else 0.0
