"""Models that leave the mesh to be served."""

from tfscale.serving.export import export

__all__ = ["export"]
