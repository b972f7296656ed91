"""Variables on parameter servers, steps on workers that do not wait."""

from tfscale.parameter_server.model import ParameterServerModel
from tfscale.parameter_server.strategy import ParameterServerStrategy

__all__ = ["ParameterServerModel", "ParameterServerStrategy"]
