"""Refuses a backend that tfscale cannot run on, warns of untested versions.

Importing this module makes the checks, so `tfscale/__init__.py` imports it
first. It is also the one place where the tested versions are declared:
`setup.cfg` repeats both ends as its requirements, a test compares the two.
"""

import importlib.metadata
import os
import warnings

# First and last minor release that tfscale runs on; of others users are warned.
# The whole test suite has passed with the first ones. The last ones were not
# released yet: the tests of private names have passed with keras-nightly
# 3.16.0.dev2026102704 and tf-nightly 2.23.0.dev20261026.
TESTED = {
    "keras": ("3.15", "3.16"),
    "tensorflow": ("2.21", "2.23"),
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


def installed(package: str) -> str:
    """The distributions that a package is of, with versions.

    A nightly is another distribution than the release.
    """
    names = importlib.metadata.packages_distributions().get(package, ())
    found = [
        f"{name} {importlib.metadata.version(name)}"
        for name in sorted({*names})
    ]
    return " and ".join(found) or f"{package}, which pip did not install"


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
