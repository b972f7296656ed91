import importlib.metadata
import os
import re
import subprocess
import sys
import warnings
from unittest import mock

import keras
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.source_files import REPOSITORY
from tfscale import _version_check


def _bounds(package):
    """`(first version, first version that is too new)`, in all extras."""
    with open(os.path.join(REPOSITORY, "setup.cfg")) as file:
        found = re.findall(
            rf"^    {package}(?:\[.*\])?>=(.*),<(.*)$", file.read(), re.M
        )
    (bounds,) = set(found)
    return bounds


class VersionCheckTest(parameterized.TestCase):
    def test_installed_versions_are_tested_ones(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _version_check.check_version("keras", keras.__version__)
            _version_check.check_version("tensorflow", tf.__version__)

    @parameterized.parameters("tensorflow", "keras")
    def test_either_side_of_the_tested_range_is_a_warning(self, package):
        first, last = _version_check.TESTED[package]
        before = first.split(".")[0] + f".{int(first.split('.')[1]) - 1}.0"
        after = last.split(".")[0] + f".{int(last.split('.')[1]) + 1}.0-rc1"
        for version in (before, after):
            with self.assertWarnsRegex(
                UserWarning, f"tested with {package} .*Received: {package} "
            ):
                _version_check.check_version(package, version)

    @parameterized.parameters("tensorflow", "keras")
    def test_setup_cfg_requires_the_tested_versions(self, package):
        first, last = _version_check.TESTED[package]
        lower, upper = _bounds(package)
        self.assertStartsWith(lower, first + ".")
        major, minor = last.split(".")
        self.assertEqual(upper, f"{major}.{int(minor) + 1}")

    @parameterized.parameters("tensorflow", "keras")
    def test_what_is_installed_is_named_as_pip_knows_it(self, package):
        # A nightly is no `keras`, of which there is no version then.
        name, version = _version_check.installed(package).split()
        found = importlib.metadata.version(name)
        self.assertEqual(version, found)

    def test_a_nightly_is_named(self):
        found = {"keras": ["keras-nightly", "keras-nightly"]}
        with (
            mock.patch.object(
                importlib.metadata, "packages_distributions", lambda: found
            ),
            mock.patch.object(
                importlib.metadata, "version", {"keras-nightly": "3.16.0"}.get
            ),
        ):
            self.assertEqual(
                _version_check.installed("keras"), "keras-nightly 3.16.0"
            )
            # Without metadata, as in an archive of sources.
            self.assertIn("tensorflow", _version_check.installed("tensorflow"))

    def test_another_backend_is_refused_at_import(self):
        process = subprocess.run(
            [sys.executable, "-c", "import tfscale"],
            capture_output=True,
            cwd=REPOSITORY,
            env={**os.environ, "KERAS_BACKEND": "jax"},
            text=True,
        )
        self.assertNotEqual(process.returncode, 0)
        self.assertIn("ImportError: tfscale needs Keras", process.stderr)
        self.assertIn("Received: backend='jax'", process.stderr)
        self.assertIn("KERAS_BACKEND=tensorflow", process.stderr)


if __name__ == "__main__":
    absltest.main()
