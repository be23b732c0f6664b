"""The config's schema, and how TOML files become a `Config`."""

from megatron_dppo.config.load import dump_config, load_config
from megatron_dppo.config.rollout import (
    EmbeddedRollout,
    RolloutConfig,
    SglangRollout,
    TransformersEngineConfig,
)
from megatron_dppo.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrackingConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EmbeddedRollout",
    "EvaluationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RolloutConfig",
    "RunConfig",
    "SglangRollout",
    "TrackingConfig",
    "TransformersEngineConfig",
    "dump_config",
    "load_config",
]
