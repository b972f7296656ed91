"""Keras 3 on TensorFlow, past one device: pipelines of stages and of data."""

from tfscale import _version_check as _version_check  # refuses, so first
from tfscale import callbacks
from tfscale import collectives
from tfscale import data
from tfscale import layers
from tfscale import losses
from tfscale import optimizers
from tfscale import schedules
from tfscale._version import __version__
from tfscale.backup.export import export_backup
from tfscale.cluster.initialize import initialize
from tfscale.cluster.virtual_devices import use_virtual_devices
from tfscale.comparison.benchmark import benchmark
from tfscale.comparison.compare import compare
from tfscale.mesh.device_mesh import device_mesh
from tfscale.mesh.gradient_sums import sum_gradients
from tfscale.mesh.strategy import MeshStrategy
from tfscale.parameter_server import ParameterServerModel
from tfscale.parameter_server import ParameterServerStrategy
from tfscale.pipeline import PipelineModel
from tfscale.pipeline.cut_model import cut
from tfscale.planner import plan
from tfscale.serving import export
from tfscale.tensor_parallel.layouts.auto_layout import auto_layout_map
from tfscale.tensor_parallel.summary import sharding_summary

__all__ = [
    "MeshStrategy",
    "ParameterServerModel",
    "ParameterServerStrategy",
    "PipelineModel",
    "__version__",
    "auto_layout_map",
    "benchmark",
    "callbacks",
    "collectives",
    "compare",
    "cut",
    "data",
    "device_mesh",
    "export",
    "export_backup",
    "initialize",
    "layers",
    "losses",
    "optimizers",
    "plan",
    "schedules",
    "sharding_summary",
    "sum_gradients",
    "use_virtual_devices",
]
