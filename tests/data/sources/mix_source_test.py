"""A mixture: weights, each record once in its own epoch, exact positions."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tfscale import data

_SIZES = (30, 7, 12)
_WEIGHTS = (0.5, 0.3, 0.2)


def _mix(exhausted, sizes=_SIZES, weights=_WEIGHTS):
    return data.mix(
        {
            f"{number}": (
                data.arrays(np.arange(size) + 1000 * number),
                weight,
            )
            for number, (size, weight) in enumerate(
                zip(sizes, weights, strict=True)
            )
        },
        exhausted=exhausted,
    )


def _records(source, epochs=1, **kwargs):
    kwargs = {"batch_size": 8, "cache": "none", **kwargs}
    pipeline = data.pipeline(source, **kwargs)
    return [
        int(record)
        for _ in range(epochs)
        for batch in pipeline
        for record in batch
    ]


class MixTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("repeat", "stop", "renormalize")
    @pytest.mark.crossing(every=3)
    def test_weights_hold_all_along(self, exhausted):
        records = np.array(_records(_mix(exhausted))) // 1000
        until = 23 if exhausted == "renormalize" else len(records)
        for length in range(1, until + 1):
            for number, weight in enumerate(_WEIGHTS):
                came = int(np.sum(records[:length] == number))
                self.assertLess(abs(came - weight * length), 1.5)

    @parameterized.product(
        exhausted=("repeat", "stop", "renormalize"), shuffle=(False, True)
    )
    @pytest.mark.crossing(every=3)
    def test_each_record_once_in_its_own_epoch(self, exhausted, shuffle):
        records = np.array(_records(_mix(exhausted), 4, shuffle=shuffle))
        for number, size in enumerate(_SIZES):
            own = records[records // 1000 == number] - 1000 * number
            orders = [own[at : at + size] for at in range(0, len(own), size)]
            for order in orders[:-1]:
                self.assertCountEqual(order.tolist(), range(size))
            self.assertLen(set(orders[-1].tolist()), len(orders[-1]))
            if shuffle:
                self.assertNotAllEqual(orders[0], orders[1])

    def test_when_an_epoch_ends(self):
        # 7 of 0.3: at the place of the seventh; 30 of 0.5: of the thirtieth.
        self.assertLen(_records(_mix("stop")), _mix("stop").num_records)
        stop, repeat = (
            _mix(policy).num_records for policy in ("stop", "repeat")
        )
        self.assertBetween(stop, 21, 24)
        self.assertBetween(repeat, 58, 61)
        each = _records(_mix("renormalize"))
        self.assertLen(each, sum(_SIZES))
        self.assertLen(set(each), sum(_SIZES))

    @parameterized.parameters("repeat", "stop", "renormalize")
    @pytest.mark.crossing(every=3)
    def test_resume_at_every_batch_and_with_two_workers(self, exhausted):
        source = _mix(exhausted)
        pipeline = data.pipeline(source, batch_size=4, remainder="drop")
        pipeline.position.assign(epoch=3)
        whole = list(pipeline.as_numpy_iterator())
        for stop in range(len(whole)):
            pipeline.position.assign(epoch=3, index=4 * stop)
            rest = list(pipeline.as_numpy_iterator())
            self.assertAllEqual(whole[stop:], rest)
        workers = [
            data.pipeline(
                source,
                batch_size=4,
                remainder="drop",
                input_context=tf.distribute.InputContext(2, worker, 2),
            )
            for worker in range(2)
        ]
        for worker in workers:
            worker.position.assign(epoch=3, index=8)
        halves = [list(worker.as_numpy_iterator()) for worker in workers]
        self.assertAllEqual(whole[2:], np.concatenate(halves, axis=1))

    def test_records_one_by_one_are_those_of_batches(self):
        path = self.create_tempdir().full_path
        for number in range(5):
            with open(f"{path}/{number}", "w") as file:
                file.write(str(number))
        files = {
            name: (data.files(f"{path}/{name}*"), weight)
            for name, weight in (("0", 1), ("[1-4]", 3))
        }
        pipeline = data.pipeline(
            data.mix(files, exhausted="stop"),
            parse=lambda contents, path: tf.strings.to_number(contents),
            batch_size=4,
            shuffle=False,
            cache="none",
        )
        self.assertFalse(pipeline.recipe.batchwise)
        (batch,) = pipeline
        self.assertLen(set(batch.numpy().tolist()), len(batch))
        by_batch = _records(_mix("repeat"))
        one_by_one = _records(
            _mix("repeat"),
            augment=lambda record, seed: record,
        )
        self.assertEqual(by_batch, one_by_one)

    def test_weights_whose_sum_is_no_number(self):
        source = _mix("renormalize", weights=(1e308, 1e308, 1e308))
        self.assertCountEqual(_records(source), _records(_mix("renormalize")))

    def test_shapes_that_parse_makes_one(self):
        # They were put together before `parse`, and the graph was refused.
        sources = {
            f"{size}": (data.arrays(np.full([2, size], size)), 1)
            for size in (2, 3)
        }
        mixed = data.mix(sources, exhausted="renormalize")
        pipeline = data.pipeline(
            mixed, batch_size=4, shuffle=False, parse=tf.reduce_max
        )
        (batch,) = pipeline
        self.assertAllEqual(np.sort(batch), [2, 2, 3, 3])
        with self.assertRaisesRegex(tf.errors.OpError, "one shape.*`parse`"):
            list(data.pipeline(mixed, batch_size=4))

    def test_what_is_no_mixture_is_refused(self):
        rows = data.arrays(np.arange(3))
        with self.assertRaisesRegex(ValueError, "must have a source"):
            data.mix({})
        for weight in (0, -1, float("nan"), float("inf"), "1", None):
            with self.assertRaisesRegex(ValueError, "numbers above 0.*'a'"):
                data.mix({"a": (rows, weight)})
        for sources in ({"a": rows}, [(rows, 1)], {"a": (rows, 1, 2)}):
            with self.assertRaisesRegex(TypeError, "dict from names"):
                data.mix(sources)
        with self.assertRaisesRegex(
            ValueError, "have a record.*'b', of arrays"
        ):
            none = data.arrays(np.arange(0))
            data.mix({"a": (rows, 1), "b": (none, 1)})
        with self.assertRaisesRegex(ValueError, "1000th"):
            data.mix({"a": (rows, 1), "b": (rows, 1e-5)})
        with self.assertRaisesRegex(ValueError, "structure.*'b'"):
            other = data.arrays(np.ones([3, 2]))
            data.mix({"a": (rows, 1), "b": (other, 1)})
        with self.assertRaisesRegex(TypeError, "random.*'a', a dataset"):
            stream = data.dataset(tf.data.Dataset.range(3))
            data.mix({"a": (stream, 1)})
        with self.assertRaisesRegex(ValueError, "exhausted='end'"):
            data.mix({"a": (rows, 1)}, exhausted="end")
        with self.assertRaisesRegex(TypeError, "'a', a mix"):
            data.mix({"a": (_mix("stop"), 1)})
        with self.assertRaisesRegex(ValueError, "cache='memory'"):
            _records(_mix("stop"), cache="memory")


if __name__ == "__main__":
    absltest.main()
