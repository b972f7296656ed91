"""Which classes come before those of Keras in a step and after it, in order.

A mixin whose `super()` is another one depends on their order. It is written
down here, so that whoever changes it sees what comes before what.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tests import same_numbers


def mixins(instance):
    """Classes before the plain one of an object, but for named-alike ones."""
    plain = instance.__class__
    return [
        kind.__name__
        for kind in type(instance).__mro__
        if not issubclass(plain, kind)
        and kind.__name__ not in (plain.__name__, "Mixin")
    ]


def on(mesh, layouts=None):
    """The strategy of a mesh."""
    same_numbers.reset()
    return tfscale.MeshStrategy(mesh, layouts)


def train(wrap, strategy, callbacks=()):
    """Fits a model; the mixins of its parts while its loss is traced.

    They are put once, and stay.
    """
    traced = {}

    def parts():
        return {
            "model": trained,
            "inner model": model,
            "optimizer": trained.optimizer,
            "loss": trained._compile_loss,
            "seeds": dropout.seed_generator,
            **{layer.name: layer for layer in model.layers},
        }

    def note(y, y_pred):
        traced.update((name, mixins(part)) for name, part in parts().items())
        return keras.ops.square(y - y_pred)

    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, name="dropout")
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(4, name="wide"),
                keras.layers.BatchNormalization(name="norm"),
                dropout,
                keras.layers.Dense(3, name="narrow"),
            ]
        )
        trained = wrap(model)
        trained.compile("sgd", note)
    x = np.ones((8, 4), "float32")
    trained.fit(x, x[:, :3], batch_size=8, verbose=0, callbacks=list(callbacks))
    stayed = {name: mixins(part) for name, part in parts().items()}
    assert stayed == traced, stayed
    return traced


class OrderTest(parameterized.TestCase):
    @pytest.mark.crossing
    def test_of_a_pipeline_on_three_axes(self):
        found = train(
            lambda model: tfscale.PipelineModel(model, 2, balance=["norm"]),
            on(
                tfscale.device_mesh(data=2, pipeline=2, model=2),
                {
                    ".*wide/kernel": (None, "model"),
                    ".*wide/bias": ("model",),
                },
            ),
        )
        self.assertEqual(
            found,
            {
                # A pipeline makes the step of its stages by itself.
                "model": [],
                "inner model": [],
                "optimizer": ["MeshOptimizer"],
                "loss": [],
                "seeds": ["MeshSeedGenerator"],
                "wide": ["MeshLayer"],
                "norm": ["MeshBatchNormalization", "MeshLayer"],
                "dropout": [],
                "narrow": [],
            },
        )

    @parameterized.parameters((2, ["MeshSeedGenerator"]), (None, []))
    @pytest.mark.crossing(every=2)
    def test_of_accumulation(self, replicas, seeds):
        same_numbers.reset()
        found = train(
            lambda model: model,
            on(tfscale.device_mesh(data=replicas))
            if replicas
            else tf.distribute.get_strategy(),
            [tfscale.callbacks.GradientAccumulation(2)],
        )
        shared = ["SharedModel"] if replicas else []
        model = ["AccumulatedModel", *shared, "MeshModel", "MeshLayer"]
        self.assertEqual(
            found,
            {
                "model": model,
                "inner model": model,
                "optimizer": ["MeshOptimizer"],
                "loss": ["MeshCompileLoss"],
                "seeds": seeds,
                "wide": [],
                "norm": ["MeshBatchNormalization", "MeshLayer"],
                "dropout": [],
                "narrow": [],
            },
        )
