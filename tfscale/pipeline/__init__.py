"""Pipeline parallelism: models cut into stages, traced and executed."""

from tfscale.pipeline.model import PipelineModel

__all__ = ["PipelineModel"]
