"""Families of keras.applications train a step as pipelines, cut by size.

In float64: deep networks with BatchNorm on tiny maps are chaotic, in plain
Keras too. All of them, in 7 GB: `TFSCALE_APPLICATIONS=all pytest` and this
file, or some, by their names with commas between.
"""

import os

import keras
import numpy as np
from absl.testing import parameterized

import tfscale
from tests import same_numbers
from tests.pipeline import one_step

# The least of each family, and its least picture.
SIZES = dict(
    ConvNeXtTiny=32,
    DenseNet121=32,
    EfficientNetB0=32,
    EfficientNetV2B0=32,
    InceptionResNetV2=75,
    InceptionV3=75,
    MobileNet=32,
    MobileNetV2=32,
    MobileNetV3Small=32,
    NASNetMobile=32,
    ResNet50=32,
    ResNet50V2=32,
    VGG16=32,
    VGG19=32,
    Xception=71,
)
LARGER = {
    *(f"ConvNeXt{size}" for size in ("Small", "Base", "Large", "XLarge")),
    *("DenseNet169", "DenseNet201", "MobileNetV3Large", "NASNetLarge"),
    *(f"EfficientNetB{i}" for i in range(1, 8)),
    *(f"EfficientNetV2{size}" for size in ("B1", "B2", "B3", "S", "M", "L")),
    *("ResNet101", "ResNet152", "ResNet101V2", "ResNet152V2"),
}
OPTIONS = dict(
    MobileNet=dict(alpha=0.25),
    MobileNetV2=dict(alpha=0.35),
    MobileNetV3Small=dict(minimalistic=True),
)
# With two, plain Keras differs from itself by 0.003 of the gradients.
ROWS = dict(EfficientNetV2B0=8)
CHEAP = ("VGG16",)


def families():
    chosen = os.environ.get("TFSCALE_APPLICATIONS", ",".join(CHEAP))
    return list(SIZES) if chosen == "all" else chosen.split(",")


class ApplicationsTest(parameterized.TestCase):
    def test_every_application_is_in_a_table(self):
        # So that a new one is noticed.
        public = {
            name
            for name, value in vars(keras.applications).items()
            if callable(value)
        }
        self.assertEqual({*SIZES, *LARGER}, public)

    @parameterized.parameters(*((family,) for family in families()))
    def test_one_step(self, family):
        same_numbers.reset()
        keras.config.set_floatx("float64")
        self.addCleanup(keras.config.set_floatx, "float32")
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float64")
        self.addCleanup(keras.config.set_dtype_policy, policy)
        strategy = tfscale.MeshStrategy(tfscale.device_mesh(pipeline=2))
        size = SIZES[family]
        with strategy.scope():
            model = getattr(keras.applications, family)(
                include_top=False,
                weights=None,
                input_shape=(size, size, 3),
                pooling="avg",
                **OPTIONS.get(family, {}),
            )
        for layer in model.layers:
            for rate in ("rate", "drop_path_rate"):
                if hasattr(layer, rate):  # other draws are other numbers
                    setattr(layer, rate, 0.0)
        x = np.random.RandomState(0).uniform(
            0, 255, (ROWS.get(family, 2), size, size, 3)
        )
        old = [np.array(v) for v in model.trainable_variables]
        y, loss, gradients = one_step.on_one_device(model, x)
        with strategy.scope():
            pipeline = tfscale.PipelineModel(model, 1, balance="params")
            pipeline.compile(keras.optimizers.SGD(one_step.RATE), "mse")
        found = pipeline.train_on_batch(x, y, return_dict=True)["loss"]
        np.testing.assert_allclose(found, loss, rtol=1e-6)
        one_step.assert_same(model.trainable_variables, old, gradients)
