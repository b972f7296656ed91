"""Two workers train at the same time; what is counted is counted once."""

from absl.testing import absltest

from tests import forked_cluster
from tests.parameter_server.two_workers import STEPS


class TwoWorkersTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.codes, cls.results = forked_cluster.results(
            "tests.parameter_server.two_workers",
            {"chief": 1, "worker": 2, "ps": 1},
            spares=[("worker", 0), ("worker", 1)],
        )

    def test_it_converges(self):
        found = self.results["both"]
        self.assertLess(found["loss"][2], found["loss"][0] / 2)
        self.assertGreater(found["accuracy"][2], 0.9)

    def test_steps_are_counted_once(self):
        # Read and written back, `iterations` lost some of the steps, and a
        # metric that all workers shared came to an accuracy of 1.17.
        found = self.results["both"]
        self.assertEqual(found["iterations"], [STEPS, 2 * STEPS, 3 * STEPS])
        self.assertEqual(found["counted"], 3 * STEPS)
        self.assertEqual(found["rows"], [20.0 * STEPS] * 3)

    def test_callbacks_get_the_metrics_of_steps_that_are_over(self):
        found = self.results["both"]["of steps"]
        self.assertLen(found, 3 * STEPS)
        self.assertGreater(min(found), 0.0)
        self.assertLess(found[-1], found[0])

    def test_each_batch_is_trained_on_by_one_worker(self):
        # All workers went over the same batches in the same order, so that
        # several got no further than one.
        found = self.results["batches"]
        self.assertEqual(found["most"], [1.0, 1.0])
        self.assertEqual(found["contexts"], [[2, 0], [2, 1]])

    def test_evaluation_and_predictions_are_those_of_one_device(self):
        expected, found = self.results["evaluated"]
        for a, b in zip(expected, found, strict=True):
            self.assertAlmostEqual(a, b, places=5)
        self.assertLess(self.results["predicted"], 1e-5)

    def test_training_waits_for_workers_that_were_killed_at_once(self):
        # Those that were back did not know of results that TensorFlow had said
        # were there: an InvalidArgumentError, of a remote handle.
        self.assertEqual(
            self.results["both are killed"]["rows"], [20.0 * STEPS] * 2
        )
        self.assertEqual(self.results["they come back"], [True, True])

    def test_training_goes_on_without_a_worker_that_was_killed_again(self):
        self.assertEqual(
            self.results["one is killed"]["rows"], [20.0 * STEPS] * 2
        )
        self.assertGreater(self.results["after"][1], 0.9)

    def test_a_server_that_was_killed_is_named_in_time(self):
        self.assertRegex(
            self.results["server"],
            r"^ConnectionError: Parameter servers must run.*ps 0 at localhost",
        )
        self.assertLess(self.results["seconds"], 30.0)

    def test_all_end(self):
        self.assertEqual(
            self.codes,
            {
                "chief0": 0,
                "worker0": -9,
                "worker0_again": 0,
                "worker1": -9,
                "worker1_again": -9,
                "ps0": -9,
            },
        )


if __name__ == "__main__":
    absltest.main()
