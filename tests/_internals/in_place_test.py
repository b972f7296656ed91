"""What stands in the place of a class is not seen by who copies or saves."""

import copy
import os
import pickle

import keras
import tensorflow as tf

import tfscale
from tfscale.adapters.layer import MeshLayer
from tfscale.adapters.seed_generator import MeshSeedGenerator
from tfscale.tensor_parallel import rank_seeds


class InPlaceTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        mesh = tfscale.device_mesh(model=2)
        layouts = {".*kernel": (None, "model"), ".*bias": ("model",)}
        with tfscale.MeshStrategy(mesh, layouts).scope():
            self.model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(2, name="dense")]
            )
        self.layer = self.model.layers[0]

    def test_a_sharded_layer_is_of_both_classes(self):
        self.assertIsInstance(self.layer, MeshLayer)
        self.assertIsInstance(self.layer, keras.layers.Dense)
        self.assertIs(self.layer.__class__, keras.layers.Dense)
        self.assertEqual(type(self.layer).__name__, "Dense")

    def test_copies_of_a_model_are_plain(self):
        path = os.path.join(self.get_temp_dir(), "model.keras")
        self.model.save(path)
        weights = self.model.get_weights()
        for model in (
            keras.models.clone_model(self.model),
            keras.models.load_model(path),
            copy.deepcopy(self.model),
            pickle.loads(pickle.dumps(self.model)),
        ):
            (layer,) = model.layers
            self.assertIs(type(layer), keras.layers.Dense)
            self.assertEqual(layer.get_config(), self.layer.get_config())
            # A clone has weights of its own.
            for one, other in zip(model.get_weights(), weights, strict=True):
                self.assertEqual(one.shape, other.shape)
        self.assertAllEqual(model.get_weights()[0], weights[0])

    def test_a_generator_is_of_its_class(self):
        generator = keras.random.SeedGenerator(3)
        rank_seeds.attach(generator)
        self.assertIsInstance(generator, MeshSeedGenerator)
        self.assertIs(generator.__class__, keras.random.SeedGenerator)
        self.assertIs(type(copy.copy(generator)), keras.random.SeedGenerator)
        config = keras.saving.serialize_keras_object(generator)
        self.assertEqual(config["module"], "keras.random")


if __name__ == "__main__":
    tf.test.main()
