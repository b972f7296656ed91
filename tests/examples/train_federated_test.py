"""Federated averaging with one local step is SGD on all data."""

import importlib

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from absl.testing import flagsaver


class FederatedTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        # Not at the top: programs that are forked define its flags themselves.
        self.federated = importlib.import_module("examples.train_federated")

    def test_one_local_step_is_a_step_of_sgd(self):
        alone = tf.distribute.get_strategy()
        with flagsaver.flagsaver(
            num_rows=64, num_clients=3, num_rounds=1, one_step=True
        ):
            [found] = self.federated.take_turns(alone)
            model = self.federated.build(alone)
            data = [self.federated.rows_of(client) for client in range(3)]
            x, y = (np.concatenate(each) for each in zip(*data))
            self.assertLen({len(rows) for rows, _ in data}, 3)
            model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
            for a, b in zip(found, self.federated.values(model)):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)

    def test_clients_of_different_models_are_refused(self):
        alone = tf.distribute.get_strategy()
        found = []
        for width in (8, 8, 16):
            with flagsaver.flagsaver(width=width):
                model = self.federated.build(alone)
            found.append(
                self.federated.fingerprint(self.federated.values(model))
            )
        self.federated.check_fingerprints(found[:2])
        with self.assertRaisesRegex(
            ValueError, r"clients \[2\] than in client"
        ):
            self.federated.check_fingerprints(found)

    def test_clients_that_drop_out_do_not_count(self):
        parts = [[np.ones(2)], [np.full(2, 4.0)]]
        [found] = self.federated.average(parts, [1, 2])
        np.testing.assert_allclose(found, [3.0, 3.0])
        with flagsaver.flagsaver(dropout=0.5):
            there = [self.federated.takes_part(0, r) for r in range(20)]
        self.assertLen({*there}, 2)


if __name__ == "__main__":
    absltest.main()
