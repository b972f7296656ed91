import os
import re

import keras
import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tests.source_files import REPOSITORY


def _read(name):
    with open(os.path.join(REPOSITORY, name), encoding="utf-8") as file:
        return file.read()


def _build_model():
    hidden = [keras.layers.Dense(8, "relu") for _ in range(4)]
    return keras.Sequential(
        [keras.Input((4,)), *hidden, keras.layers.Dense(3, "softmax")]
    )


class ReadmeTest(tf.test.TestCase):
    def test_the_quick_start_runs_and_saves_a_plain_model(self):
        (program,) = re.findall(
            r"^```python\n(.*?)^```", _read("README.md"), re.M | re.S
        )
        x = np.ones((32, 4), "float32")
        y = np.zeros((32,), "int32")
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        here = os.getcwd()
        os.chdir(self.create_tempdir().full_path)
        self.addCleanup(os.chdir, here)
        names = {"build_model": _build_model, "dataset": dataset}
        exec(program, names)
        loaded = keras.models.load_model("model.keras")
        self.assertIs(type(loaded), keras.Sequential)
        self.assertAllClose(
            loaded.predict_on_batch(x), names["model"].predict(x, verbose=0)
        )

    def test_continuous_integration_runs_what_the_readme_says(self):
        ((extra, options),) = re.findall(
            r"pip install -e (\S+) && .*/pytest\b(.*)", _read("README.md")
        )
        script = _read(".ci/run")
        self.assertIn(f'pip" install --quiet -e {extra}', script)
        self.assertIn(f'pytest"{options}', script)


if __name__ == "__main__":
    absltest.main()
