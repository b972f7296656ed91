"""An optimizer of a mesh is, to all who look at it, the one that was made."""

import copy
import pickle

import keras
import tensorflow as tf
from absl.testing import parameterized
from keras.src import testing

import tfscale
from tfscale.adapters.optimizer import MeshOptimizer

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=1.0, use_ema=True),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.AdamW(0.01)
    ),
}


@keras.saving.register_keras_serializable("tfscale_tests")
class OwnOptimizer(keras.optimizers.SGD):
    pass


def scope_of_mesh(**kwargs):
    mesh = tfscale.device_mesh(data=2, model=2)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    return tfscale.MeshStrategy(mesh, layout_map, **kwargs).scope()


class OptimizerTest(testing.TestCase):
    def test_keras_own_serialization_test_passes_in_the_scope(self):
        # It compares `dir`: of one that was made in the scope there used to be
        # more than of one that is made outside.
        for name, make in {**OPTIMIZERS, "own": OwnOptimizer}.items():
            for stage in (0, 1):
                with self.subTest(f"{name}, zero_stage={stage}"):
                    with scope_of_mesh(zero_stage=stage):
                        optimizer = make()
                        self.run_class_serialization_test(optimizer)
                    self.run_class_serialization_test(optimizer)

    def test_what_is_saved_knows_nothing_of_a_mesh(self):
        with scope_of_mesh():
            optimizer = OPTIMIZERS["scaled"]()
        keras.utils.clear_session()
        plain = OPTIMIZERS["scaled"]()
        self.assertEqual(
            keras.saving.serialize_keras_object(optimizer),
            keras.saving.serialize_keras_object(plain),
        )


class InPlaceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*OPTIMIZERS)
    def test_it_is_of_its_class_and_of_that_in_its_place(self, name):
        with scope_of_mesh():
            optimizer = OPTIMIZERS[name]()
        plain = type(OPTIMIZERS[name]())
        self.assertIsInstance(optimizer, plain)
        self.assertIsInstance(optimizer, MeshOptimizer)
        self.assertIs(optimizer.__class__, plain)
        self.assertEqual(type(optimizer).__name__, plain.__name__)
        self.assertEqual(repr(type(optimizer)), repr(plain))

    @parameterized.parameters(
        copy.copy,
        copy.deepcopy,
        lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    )
    def test_copies_are_plain_outside_of_the_scope(self, copied):
        with scope_of_mesh():
            optimizer = OPTIMIZERS["adam"]()
        found = copied(optimizer)
        self.assertIs(type(found), keras.optimizers.Adam)
        self.assertEqual(found.get_config(), optimizer.get_config())


if __name__ == "__main__":
    tf.test.main()
