"""The version of tfscale, in the one place that setup.cfg reads it from."""

__version__ = "0.1.0"
