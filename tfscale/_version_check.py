"""Refuses a backend that tfscale cannot run on, warns of untested versions.

Importing this module makes the checks, so `tfscale/__init__.py` imports it
first. It is also the one place where the tested versions are declared:
`setup.cfg` repeats the lower ends as its requirements, a test compares the two.
"""

import os
import warnings

# First and last minor release with which the whole test suite has passed. The
# contracts of private names (tests/_internals) have also passed with Keras
# 3.14.0, 3.14.1 and 3.15.0, and with TensorFlow 2.20.0 and 2.22.0rc0 (but for
# the one of keras_hub, which needs the tensorflow-text of that release). Of
# other minor releases users are warned; Keras 3.13.2 lacks a name: refused.
TESTED = {
    "keras": ("3.15", "3.15"),
    "tensorflow": ("2.21", "2.21"),
}


def check_backend(backend):
    """Raises unless Keras runs on TensorFlow."""
    if backend != "tensorflow":
        raise ImportError(
            "tfscale needs Keras to run on its TensorFlow backend. "
            f"Received: backend={backend!r}. Set the environment variable "
            "KERAS_BACKEND=tensorflow before Keras is imported, or "
            '"backend": "tensorflow" in ~/.keras/keras.json.'
        )


def check_version(package, version):
    """Warns if the suite has never passed with this version of a package."""
    first, last = TESTED[package]
    if not _minor(first) <= _minor(version) <= _minor(last):
        warnings.warn(
            f"tfscale has been tested with {package} {first} to {last}. "
            f"Received: {package} {version}. It may well work; if it does "
            f'not, install "{package}=={last}.*".',
            stacklevel=2,
        )


def _minor(version):
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _check_installation():
    # The variable first: Keras itself cannot be imported, and says nothing of
    # tfscale, where the backend that it names is not installed.
    check_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")

    import keras
    import tensorflow as tf

    check_backend(keras.config.backend())
    check_version("keras", keras.__version__)
    check_version("tensorflow", tf.__version__)


_check_installation()
