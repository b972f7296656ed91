"""With one worker, parameter servers give the numbers of one device."""

from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_cluster
from tests.parameter_server.one_worker import ROWS
from tests.parameter_server.one_worker import STEPS

_ERRORS = {
    "outside": "must be made in the scope of a `tfscale.ParameterServerSt",
    "made outside": "All variables must be on parameter servers.*the model",
    "twice": "wrapped only once",
    "not built": "must be built before it is wrapped",
    "compiled outside": "`compile` must be called in the scope",
    "foreign optimizer": "must be on parameter servers.*the optimizer",
    "eager": "run_eagerly=True",
    "xla": "jit_compile=True",
    "accumulates": "gradient_accumulation_steps=2",
    "overwrites": "ema_overwrite_frequency=5",
    "scales": "LossScaleOptimizer",
    "arrays": r"`tf.data.Dataset`.*Received: ndarray.*\.repeat\(\)",
    "callback": "Received: GradientAccumulation",
    "no steps": "no `steps_per_epoch`",
    "worker": "Tensor had Inf",
    "ends": r"must not end.*one of 3 batches.*\.repeat\(\)",
    "ends unknown": r"must not end.*one that has ended.*\.repeat\(\)",
    "old": "must be created after the strategy",
    "metric": "must begin at zero.*compile_metrics",
    "other logs": "Received: a step that returns 'mine'",
    "clips shards": "'sharded' in 2 shards.*global_clipnorm",
    "quantized fit": "variables of a wrapped model.*kernel.*`quantize`",
    "quantized predict": "variables of a wrapped model.*kernel.*`quantize`",
    "quantized": "must be quantized before it is wrapped",
    "pipeline": "must be made in the scope of a `tfscale.MeshStrategy`",
}


class OneWorkerTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.codes, cls.results = forked_cluster.results(
            "tests.parameter_server.one_worker",
            {"chief": 1, "worker": 1, "ps": 2},
        )

    @parameterized.parameters(*ROWS)
    def test_the_numbers_are_those_of_one_device(self, row):
        result = self.results[row]
        self.assertTrue(result["names"])
        # Sums over rows of an embedding are taken in another order.
        most = 1e-5 if row in ("embeddings", "sharded") else 0.0
        for name, difference in result["differences"].items():
            with self.subTest(name):
                self.assertLessEqual(difference, most)
        on_batch = 1 if row == "layers" else 0
        self.assertEqual(result["iterations"], 2 * STEPS + on_batch)

    @parameterized.parameters(*ROWS)
    def test_every_variable_is_on_a_server(self, row):
        self.assertEqual(
            self.results[row]["devices"],
            [f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(2)],
        )

    def test_rows_of_an_embedding_and_their_slots_are_on_all_servers(self):
        shards = self.results["sharded"]["shards"]
        first, second = self.results["sharded"]["devices"]
        # The table, then two slots of each shard.
        self.assertIn(
            shards,
            (
                [first, second, first, first, second, second],
                [second, first, second, second, first, first],
            ),
        )

    @parameterized.parameters(*ROWS)
    def test_what_is_saved_is_the_plain_model(self, row):
        kind, difference = self.results[row]["saved"]
        self.assertIn(kind, ("Sequential", "OwnStep"))
        self.assertEqual(difference, 0.0)

    @parameterized.parameters(*_ERRORS)
    def test_what_cannot_be_trained_is_said(self, case):
        found = self.results["errors"][case]
        kind = "InvalidArgumentError" if case == "worker" else "ValueError"
        self.assertStartsWith(found, f"{kind}: ")
        self.assertRegex(found, _ERRORS[case])

    def test_after_an_error_it_trains(self):
        self.assertIn("accuracy", self.results["errors"]["after"])

    def test_servers_end_with_the_chief(self):
        self.assertEqual(set(self.codes.values()), {0}, self.codes)


if __name__ == "__main__":
    absltest.main()
