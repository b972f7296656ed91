"""The table of operations that draw has each that has a seed of its own."""

import inspect

import tensorflow as tf

from tfscale.graphs import random_operations

# They keep all candidates, or find those that were drawn; the dropout of a
# cuDNN layer of Keras is not that of cuDNN; the seeds of datasets are inputs.
_OTHERS = ("AllCandidate", "ComputeAccidentalHits", "CudnnRNN")


class RandomOperationsTest(tf.test.TestCase):
    def test_an_operation_with_seeds_draws_from_state(self):
        found = [
            name
            for name, operation in vars(tf.raw_ops).items()
            if callable(operation)
            and "seed2" in inspect.signature(operation).parameters
            and not name.startswith(_OTHERS)
            and "Dataset" not in name
            and "SeedGenerator" not in name
        ]
        self.assertContainsSubset(["RandomCrop", "TruncatedNormal"], found)
        for name in found:
            self.assertTrue(random_operations.draws_from_state(name), name)


if __name__ == "__main__":
    tf.test.main()
