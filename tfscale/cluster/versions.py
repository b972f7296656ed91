"""The versions that all processes of a cluster must have."""

import platform

import keras
import tensorflow as tf

from tfscale._version import __version__


def versions() -> dict[str, str]:
    """What has to be equal in all of them, by name.

    Example:

    >>> import tfscale
    >>> versions()["version of tfscale"] == tfscale.__version__
    True
    """
    return {
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of TensorFlow": tf.__version__,
        "version of Keras": keras.__version__,
        "version of tfscale": __version__,
    }
