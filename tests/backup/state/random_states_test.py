"""Random states go on, also those that belong to a strategy."""

import keras
import tensorflow as tf
from absl.testing import parameterized

import tfscale
from tfscale._internals import attributes
from tfscale.backup.state.random_states import random_states
from tfscale.backup.state.random_states import set_random_states


def mesh():
    return tfscale.MeshStrategy(tfscale.device_mesh(data=2))


class RandomStatesTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        before = attributes.global_generator()
        self.addCleanup(tf.random.set_global_generator, before)
        self.forget()

    def forget(self):
        """As in the next process."""
        tf.random.set_global_generator(None)
        keras.utils.clear_session()

    def test_a_generator_that_nobody_uses_is_not_made(self):
        states = random_states()
        self.assertIsNone(states["tensorflow"])
        self.assertIsNone(states["keras"])
        set_random_states(states)
        self.assertIsNone(attributes.global_generator())
        self.assertIsNone(attributes.used_seed_generator())

    @parameterized.parameters(False, True)
    def test_a_second_strategy_goes_on_with_global_generators(self, anew):
        """They belonged to the first one, in whose scope they were made."""
        with mesh().scope():
            keras.random.uniform(())
            tf.random.get_global_generator()
            states = random_states()
        expected = states["tensorflow"][0].copy(), states["keras"][0].copy()
        if anew:
            self.forget()
        for _ in range(2):
            with mesh().scope():
                set_random_states(states)
                states = random_states()
            self.assertAllEqual(states["tensorflow"][0], expected[0])
            self.assertAllEqual(states["keras"][0], expected[1])


if __name__ == "__main__":
    tf.test.main()
