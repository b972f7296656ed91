import configparser
import os
import subprocess
import sys
import warnings

import keras
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests.source_files import REPOSITORY
from tfscale import _version_check


def _lower_bounds():
    config = configparser.ConfigParser()
    config.read(os.path.join(REPOSITORY, "setup.cfg"))
    requirements = config["options"]["install_requires"].split()
    return dict(line.split(">=") for line in requirements if ">=" in line)


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
    def test_setup_cfg_requires_the_first_tested_version(self, package):
        first, _ = _version_check.TESTED[package]
        self.assertTrue(_lower_bounds()[package].startswith(first + "."))

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
