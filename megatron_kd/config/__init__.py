"""Recipes: one strict schema, and its loading from YAML. Light: imports pydantic and PyYAML, no torch."""

from megatron_kd.config.data import CorpusConfig, DataConfig
from megatron_kd.config.differences import recipe_differences
from megatron_kd.config.layout import ClusterConfig, ParallelismConfig
from megatron_kd.config.load import dump_recipe, load_model, load_recipe
from megatron_kd.config.loss import LossConfig
from megatron_kd.config.model import ModelConfig
from megatron_kd.config.offload import OFFLOAD_KEYS
from megatron_kd.config.profile import ProfileConfig
from megatron_kd.config.recompute import RECOMPUTE_KEYS
from megatron_kd.config.roles import CaptureConfig, FromTeacherConfig, HFEngineConfig, StudentConfig, TeacherConfig
from megatron_kd.config.schema import Recipe
from megatron_kd.config.training import (
    CheckpointConfig,
    EarlyStoppingConfig,
    LoggingConfig,
    OptimizerConfig,
    TrainingConfig,
    WandbConfig,
)

__all__ = [
    "OFFLOAD_KEYS",
    "RECOMPUTE_KEYS",
    "CaptureConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CorpusConfig",
    "DataConfig",
    "EarlyStoppingConfig",
    "FromTeacherConfig",
    "HFEngineConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "ProfileConfig",
    "Recipe",
    "StudentConfig",
    "TeacherConfig",
    "TrainingConfig",
    "WandbConfig",
    "dump_recipe",
    "load_model",
    "load_recipe",
    "recipe_differences",
]
