"""Every layer of `keras.layers`, in microbatches and on replicas.

A model has a branch for each layer of an eighth of them, so that few traces are
enough. What stands in none of the tables below is a test that fails: a release
of Keras that adds a layer asks where it belongs.
"""

import functools
import inspect
import itertools

import keras
import numpy as np
import pytest
from absl.testing import parameterized

from tests import same_numbers
from tfscale._internals import releases

RANDOM = np.random.RandomState(0)
ROWS = 7
SHAPES = {
    "row": (6,),
    "sequence": (6, 4),
    "image": (4, 4, 4),
    "film": (4, 4, 4, 2),
    "frames": (2, 4, 4, 2),
    "lines": (2, 4, 2),
    "films": (2, 2, 2, 2, 2),
    "picture": (4, 4, 3),
    "numbers": (6,),
}

layers = keras.layers


def _mixed(shape, name, *args, **kwargs):
    """A layer that is given one input of some shape."""
    return shape, lambda x: getattr(layers, name)(*args, name=name, **kwargs)(x)


def _pair(name, **kwargs):
    """A layer that is given two inputs."""
    return "sequence", lambda x: getattr(layers, name)(name=name, **kwargs)(
        [x, keras.ops.sin(x)]
    )


def _attention(name, **kwargs):
    return "sequence", lambda x: getattr(layers, name)(name=name, **kwargs)(
        x, keras.ops.sin(x)
    )


def _recurrent(name, cell, mask_value=None):
    def call(x):
        if mask_value is not None:
            x = layers.Masking(mask_value)(x)
        return layers.RNN(cell(), name=name)(x)

    return "sequence", call


def _table():
    named = {}
    for name, shape, *arguments in (
        ("Activation", "row", "tanh"),
        ("ELU", "row"),
        ("LeakyReLU", "row"),
        ("PReLU", "row"),
        ("ReLU", "row"),
        ("Softmax", "row"),
        ("Dense", "row", 3),
        ("EinsumDense", "sequence", "abc,cd->abd", (6, 3)),
        ("Identity", "row"),
        ("Rescaling", "row", 2.0),
        ("ActivityRegularization", "row", 0.1),
        ("Flatten", "sequence"),
        ("Permute", "sequence", (2, 1)),
        ("RepeatVector", "row", 2),
        ("Reshape", "row", (3, 2)),
        ("GroupNormalization", "sequence", 2),
        ("LayerNormalization", "sequence"),
        ("RMSNormalization", "sequence"),
        ("UnitNormalization", "sequence"),
        ("Embedding", "numbers", 8, 3),
        ("ReversibleEmbedding", "numbers", 8, 3),
        ("CategoryEncoding", "numbers", 8, "count"),
        ("Hashing", "numbers", 4),
        ("IntegerLookup", "numbers", None, 1, None, -1, [1, 2, 3]),
        ("Discretization", "row", [0.0, 1.0]),
        ("Normalization", "row", -1, 0.5, 2.0),
        ("STFTSpectrogram", "sequence", "real", 4, 2, 4, None),
        ("AutoContrast", "picture"),
        ("CenterCrop", "picture", 2, 2),
        ("Resizing", "picture", 2, 2),
        ("Solarization", "picture"),
        ("DepthwiseConv1D", "sequence", 2),
        ("DepthwiseConv2D", "image", 2),
        ("SeparableConv1D", "sequence", 3, 2),
        ("SeparableConv2D", "image", 3, 2),
        ("SimpleRNN", "sequence", 2),
        ("GRU", "sequence", 2),
        ("LSTM", "sequence", 2),
        ("ConvLSTM1D", "lines", 2, 2),
        ("ConvLSTM2D", "frames", 2, 2),
        ("ConvLSTM3D", "films", 2, 2),
    ):
        named[name] = _mixed(shape, name, *arguments)
    for dims, shape in ((1, "sequence"), (2, "image"), (3, "film")):
        for name, *arguments in (
            ("Conv{}D", 3, 2),
            ("Conv{}DTranspose", 3, 2),
            ("AdaptiveAveragePooling{}D", 2),
            ("AdaptiveMaxPooling{}D", 2),
            ("AveragePooling{}D", 2),
            ("GlobalAveragePooling{}D",),
            ("GlobalMaxPooling{}D",),
            ("MaxPooling{}D",),
            ("Cropping{}D",),
            ("UpSampling{}D",),
            ("ZeroPadding{}D",),
        ):
            name = name.format(dims)
            named[name] = _mixed(shape, name, *arguments)
    for name in ("Add", "Average", "Concatenate", "Maximum", "Minimum"):
        named[name] = _pair(name)
    for name in ("Multiply", "Subtract", "Attention", "AdditiveAttention"):
        named[name] = _pair(name)
    named["MelSpectrogram"] = _mixed(
        "row", "MelSpectrogram", 4, 2, 4, num_mel_bins=4, power_to_db=False
    )
    named["Dot"] = _pair("Dot", axes=(2, 2))
    named["MultiHeadAttention"] = _attention(
        "MultiHeadAttention", num_heads=2, key_dim=2
    )
    named["GroupQueryAttention"] = _attention(
        "GroupQueryAttention",
        head_dim=2,
        num_query_heads=2,
        num_key_value_heads=1,
    )
    for name in ("SimpleRNNCell", "GRUCell", "LSTMCell"):
        named[name] = _recurrent(name, lambda n=name: getattr(layers, n)(2))
    named["Bidirectional"] = _mixed(
        "sequence", "Bidirectional", layers.SimpleRNN(2)
    )
    if not releases.IS_3_15:
        named["TernaryDense"] = _mixed("row", "TernaryDense", 3)
    named["Masking"] = _recurrent("Masked", lambda: layers.GRUCell(2), 0.0)
    named["TimeDistributed"] = _mixed(
        "sequence", "TimeDistributed", layers.Dense(2)
    )
    return named


# Tried by another of the table: `RNN` with every cell, and so on.
INSIDE_OF_OTHERS = ("InputLayer", "Layer", "RNN", "StackedRNNCells", "Wrapper")
# What one device makes of a batch, no microbatch of it can.
OTHER_BY_NATURE = {
    "BatchNormalization": "normalizes by what it sees (batch_norm_test.py)",
    "SpectralNormalization": "a step of power iteration in each call: warned",
}
# By default this one is that as well: it cuts off below the loudest of a batch.
WITH_ARGUMENTS = ("MelSpectrogram",)
# They draw once per microbatch, and so other numbers.
DRAWS = (
    "AlphaDropout",
    "AugMix",
    "CutMix",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "MixUp",
    "RandAugment",
    "RandomBrightness",
    "RandomColorDegeneration",
    "RandomColorJitter",
    "RandomContrast",
    "RandomCrop",
    "RandomElasticTransform",
    "RandomErasing",
    "RandomFlip",
    "RandomGaussianBlur",
    "RandomGrayscale",
    "RandomHue",
    "RandomInvert",
    "RandomPerspective",
    "RandomPosterization",
    "RandomRotation",
    "RandomSaturation",
    "RandomSharpness",
    "RandomShear",
    "RandomTranslation",
    "RandomZoom",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
    *(() if releases.IS_3_15 else ("Mosaic",)),
)
# Of other frameworks, files, strings and boxes; code that the user gives; what
# Keras itself cannot make a model of.
NOT_TRIED = (
    "ContrastLimitedAdaptiveHistogramEqualization",
    "Equalization",
    "FlaxLayer",
    "HashedCrossing",
    "JaxLayer",
    "Lambda",
    "MaxNumBoundingBoxes",
    "Pipeline",
    "StringLookup",
    "TFSMLayer",
    "TextVectorization",
    "TorchModuleWrapper",
)


def branches_of(eighth):
    """Every eighth layer of the table."""
    return dict(itertools.islice(_table().items(), eighth, None, 8))


def build(eighth):
    branches = branches_of(eighth)
    inputs, stems = {}, {}
    for name in dict.fromkeys(shape for shape, _ in branches.values()):
        is_whole = name == "numbers"
        dtype = "int32" if is_whole else "float32"
        shape = SHAPES[name]
        inputs[name] = stems[name] = keras.Input(shape, name=name, dtype=dtype)
        if name not in ("numbers", "picture"):
            stems[name] = layers.Dense(
                shape[-1], use_bias=False, name=f"to_{name}"
            )(inputs[name])
    outputs = []
    for name, (shape, call) in branches.items():
        x = keras.ops.cast(call(stems[shape]), "float32")
        x = x / 255.0 if shape == "picture" else x
        x = layers.Flatten()(x) if len(x.shape) > 2 else x
        outputs.append(layers.Dense(1, name=f"from_{name}")(x))
    return keras.Model(inputs, layers.Add()(outputs))


class EveryLayerTest(parameterized.TestCase):
    def test_each_is_in_a_table(self):
        tables = [
            *_table(),
            *INSIDE_OF_OTHERS,
            *OTHER_BY_NATURE,
            *DRAWS,
            *NOT_TRIED,
        ]
        # Some have two names: Conv2D and Convolution2D.
        aliases = {}
        for name, value in vars(layers).items():
            if inspect.isclass(value) and issubclass(value, keras.Layer):
                aliases.setdefault(value, set()).add(name)
        for names in aliases.values():
            self.assertLen(names.intersection(tables), 1, names)
        self.assertLen(tables, len(aliases))
        self.assertContainsSubset(WITH_ARGUMENTS, _table())

    @parameterized.product(
        train=(
            lambda job: same_numbers.on_mesh(job, 1, 2),
            lambda job: same_numbers.on_zero(job, data=2, zero_stage=0),
        ),
        eighth=tuple(range(8)),
    )
    @pytest.mark.crossing(every=16)
    def test_all_are_those_of_one_device(self, train, eighth):
        x = {
            name: RANDOM.normal(size=(ROWS, *SHAPES[name])).astype("float32")
            for name in dict.fromkeys(
                shape for shape, _ in branches_of(eighth).values()
            )
        }
        if "numbers" in x:
            x["numbers"] = RANDOM.randint(0, 6, (ROWS, 6)).astype("int32")
        if "picture" in x:
            x["picture"] = RANDOM.uniform(0, 255, (ROWS, 4, 4, 3))
            x["picture"] = x["picture"].astype("float32")
        y = RANDOM.normal(size=(ROWS, 1)).astype("float32")
        job = same_numbers.Job(
            functools.partial(build, eighth),
            dict(x=x, y=y, batch_size=ROWS),
            lambda: keras.optimizers.SGD(1e-3),
        )
        expected = _without_seeds(same_numbers.on_one_device(job))
        # Attention does not depend on the bias of its keys.
        same_numbers.assert_same(
            self, expected, _without_seeds(train(job)), unmoved=("key_bias",)
        )


def _without_seeds(outcome):
    """They count draws, of which there is one for each part of a batch."""
    for path in list(outcome.variables):
        if "seed_generator" in path:
            del outcome.variables[path], outcome.initial[path]
    return outcome
