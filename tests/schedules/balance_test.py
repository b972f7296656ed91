"""Balancing against brute force over all partitions."""

import itertools
import math
import random

from absl.testing import absltest
from absl.testing import parameterized

from tfscale.schedules.balance import LayerMemory
from tfscale.schedules.balance import partition
from tfscale.schedules.cut_points import cuts_from_names
from tfscale.schedules.named_schedules import one_f_one_b
from tfscale.schedules.simulate import peak_in_flight
from tfscale.schedules.simulate import simulate


def stages(values, cuts):
    bounds = [0, *cuts, len(values)]
    return [list(values[a:b]) for a, b in itertools.pairwise(bounds)]


def brute_force(costs, num_stages, places=None, fits=lambda cuts: True):
    """The best cuts of all, or None."""
    places = range(1, len(costs)) if places is None else places

    def merit(cuts):
        sums = [sum(stage) for stage in stages(costs, cuts)]
        return max(sums), sum(s * s for s in sums), cuts

    return min(
        filter(fits, itertools.combinations(places, num_stages - 1)),
        key=merit,
        default=None,
    )


def peak_bytes(memory, cuts, in_flight, recompute):
    return max(
        sum(layer.fixed for layer in stage)
        + max(layer.working for layer in stage)
        + (
            stage[0].stage_input * held
            + sum(layer.activation for layer in stage)
            - stage[0].stage_input
            if recompute
            else held * sum(layer.activation for layer in stage)
        )
        for stage, held in zip(stages(memory, cuts), in_flight, strict=True)
    )


class PartitionTest(parameterized.TestCase):
    @parameterized.parameters(*range(60))
    def test_no_partition_is_better(self, seed):
        rng = random.Random(seed)
        costs = [
            rng.choice((0, 0, 1, 2, 3, 50)) for _ in range(rng.randint(1, 10))
        ]
        for num_stages in range(1, len(costs) + 1):
            self.assertEqual(
                partition(costs, num_stages), brute_force(costs, num_stages)
            )

    @parameterized.parameters(*range(20))
    def test_no_partition_of_real_costs_is_better(self, seed):
        rng = random.Random(seed)
        costs = [rng.expovariate(1.0) for _ in range(9)]
        cuts = partition(costs, 4)
        best = brute_force(costs, 4)
        self.assertAlmostEqual(
            max(map(sum, stages(costs, cuts))),
            max(map(sum, stages(costs, best))),
            places=12,
        )

    @parameterized.parameters(*range(40))
    def test_allowed_cuts_are_kept_to(self, seed):
        rng = random.Random(seed)
        costs = [rng.randint(0, 9) for _ in range(9)]
        places = sorted(rng.sample(range(1, 9), 4))
        self.assertEqual(
            partition(costs, 3, allowed_cuts=places),
            brute_force(costs, 3, places),
        )

    @parameterized.product(seed=tuple(range(40)), recompute=(False, True))
    def test_a_memory_limit_is_kept_to(self, seed, recompute):
        rng = random.Random(seed)
        num_stages = rng.choice((2, 3))
        costs = [rng.randint(0, 9) for _ in range(7)]
        memory = [
            LayerMemory(
                rng.randint(0, 20),
                rng.randint(3, 9),
                rng.randint(0, 3),
                rng.randint(0, 12),
            )
            for _ in costs
        ]
        in_flight = peak_in_flight(one_f_one_b(num_stages, 8))
        limit = rng.randint(20, 90)
        arguments = {
            "memory": memory,
            "memory_limit": limit,
            "in_flight": in_flight,
            "recompute": recompute,
        }

        def fits(cuts):
            return peak_bytes(memory, cuts, in_flight, recompute) <= limit

        best = brute_force(costs, num_stages, fits=fits)
        if best is not None:
            self.assertEqual(partition(costs, num_stages, **arguments), best)
            return
        least = min(
            peak_bytes(memory, cuts, in_flight, recompute)
            for cuts in itertools.combinations(range(1, 7), num_stages - 1)
        )
        with self.assertRaisesRegex(
            ValueError, f"memory_limit={limit} bytes.* needs {least} bytes"
        ):
            partition(costs, num_stages, **arguments)

    @parameterized.parameters(False, True)
    def test_bytes_are_those_of_the_simulator(self, recompute):
        # A limit of what the simulator says fits, one byte less does not.
        schedule = one_f_one_b(2, 4)
        memory = [LayerMemory(0, 30, 10), LayerMemory(0, 24, 8)]
        simulation = simulate(
            schedule,
            recompute=recompute,
            activation_bytes=[30, 24],
            stage_input_bytes=[10, 8],
        )
        arguments = {
            "memory": memory,
            "in_flight": simulation.peak_in_flight,
            "recompute": recompute,
        }
        limit = max(simulation.peak_stage_bytes)
        self.assertEqual(
            partition([1, 1], 2, memory_limit=limit, **arguments), (1,)
        )
        with self.assertRaisesRegex(ValueError, f"needs {limit} bytes"):
            partition([1, 1], 2, memory_limit=limit - 1, **arguments)

    def test_layers_without_cost_still_fill_stages(self):
        self.assertEqual(partition([0, 0, 0, 0], 4), (1, 2, 3))
        self.assertEqual(partition([0, 0, 7, 0], 2), (1,))

    def test_equal_blocks_are_cut_evenly(self):
        self.assertEqual(partition([5] * 8, 4), (2, 4, 6))
        # The dear layer sets the pace; the rest is even all the same.
        self.assertEqual(partition([9, 1, 1, 1, 1, 1, 1], 3), (1, 4))

    def test_one_stage_needs_no_cut(self):
        self.assertEqual(partition([1, 2], 1), ())

    def test_a_large_model_is_cut_exactly(self):
        self.assertEqual(partition([1] * 400, 8), tuple(range(50, 400, 50)))


class PartitionErrorsTest(parameterized.TestCase):
    @parameterized.parameters(
        (([1, 2], 3), {}, "2 layers for num_stages=3. Use at most 2 stages"),
        (([1], 0), {}, "Received: num_stages=0"),
        (([1, -1], 2), {}, "Received: -1 for layer 1"),
        (([1, float("nan")], 2), {}, "Received: nan for layer 1"),
        (
            ([1, 1, 1], 3),
            {"allowed_cuts": [0, 2, 3]},
            r"1 places where the model may be cut: \[2\]. Use at most 2",
        ),
        (
            ([1, 1], 2),
            {"memory_limit": 5},
            "one entry per layer. Received: none",
        ),
        (
            ([1, 1], 2),
            {"memory_limit": 5, "memory": [(1, 1)]},
            "Received: 1 for 2 layers",
        ),
        (
            ([1, 1], 2),
            {"memory_limit": 5, "memory": [(1, 1)] * 2, "in_flight": [1]},
            "1 numbers for 2 stages",
        ),
    )
    def test_what_cannot_be_cut_is_refused(self, args, kwargs, text):
        with self.assertRaisesRegex(ValueError, text):
            partition(*args, **kwargs)


class CutsFromNamesTest(parameterized.TestCase):
    NAMES = ("embed", "block_0", "block_1", "block_2", "head")

    def test_a_named_layer_begins_a_stage(self):
        self.assertEqual(
            cuts_from_names(self.NAMES, ["block_1", "head"], 3), (2, 4)
        )
        self.assertEqual(cuts_from_names(self.NAMES, [], 1), ())

    def test_a_layer_used_twice_is_cut_at_its_first_use(self):
        names = ["embed", "block", "embed", "head"]
        self.assertEqual(cuts_from_names(names, ["block"], 2), (1,))
        with self.assertRaisesRegex(ValueError, "'embed', the first layer"):
            cuts_from_names(names, ["embed"], 2)

    @parameterized.parameters(
        (["blok_1"], 2, r"Received: 'blok_1'. Did you mean 'block_1', "),
        (["zzz"], 2, "Received: 'zzz'. Layers are, for example, 'block_0', "),
        ([3], 2, "must be the name of a layer of the model. Received: 3"),
        (["head"], 3, r"3 stages need 2 cut points.*1 cut points, \['head'\]"),
        (["block_0", "head"], 2, "2 stages need 1 cut points"),
        (["embed"], 2, "'embed', the first layer"),
        (
            ["head", "block_1"],
            3,
            r"Received: \['head', 'block_1'\]. In order they are "
            r"\['block_1', 'head'\]",
        ),
        (["head", "head"], 3, "must be different and in the order"),
    )
    def test_wrong_cut_points_are_refused(self, cut_layers, stages, text):
        with self.assertRaisesRegex(ValueError, text):
            cuts_from_names(self.NAMES, cut_layers, stages)


class TiesTest(parameterized.TestCase):
    def test_the_fewest_bytes_cross_the_cuts(self):
        # Of (2, 4), (2, 5) and (3, 5) all are as even.
        costs, cut_bytes = [2, 1, 1, 1, 1, 2, 1], [0, 9, 5, 1, 7, 2, 9]
        even = partition(costs, 3)
        self.assertEqual(
            partition(costs, 3, cut_bytes=cut_bytes),
            min(
                (
                    cuts
                    for cuts in itertools.combinations(range(1, 7), 2)
                    if sorted(map(sum, stages(costs, cuts)))
                    == sorted(map(sum, stages(costs, even)))
                ),
                key=lambda cuts: sum(cut_bytes[cut] for cut in cuts),
            ),
        )

    def test_bytes_never_make_a_stage_dearer(self):
        self.assertEqual(
            partition([1, 1, 1, 1], 2, cut_bytes=[0, 0, 9, 0]), (2,)
        )


class SharedDevicesTest(parameterized.TestCase):
    @parameterized.product(
        seed=tuple(range(12)), stage_devices=((0, 1, 0, 1), (0, 1, 1, 0))
    )
    def test_no_cut_that_moves_by_a_layer_is_better(self, seed, stage_devices):
        rng = random.Random(seed)
        costs = [rng.randint(1, 9) for _ in range(10)]

        def loads(cuts):
            sums = list(map(sum, stages(costs, cuts)))
            return sorted(
                (
                    sum(
                        own
                        for own, device in zip(sums, stage_devices, strict=True)
                        if device == each
                    )
                    for each in (0, 1)
                ),
                reverse=True,
            )

        alone = partition(costs, 4)
        cuts = partition(costs, 4, stage_devices=stage_devices)
        self.assertLessEqual(loads(cuts), loads(alone))
        for index, step in itertools.product(range(3), (-1, 1)):
            moved = list(cuts)
            moved[index] += step
            if all(map(sum, stages(costs, moved))) and moved[-1] < 10:
                self.assertGreaterEqual(loads(moved), loads(cuts))

    def test_a_device_is_as_full_as_its_stages_together(self):
        # The first device has the large first layer, and so less of the rest.
        costs = [6, 1, 1, 1, 1, 1, 1]
        cuts = partition(costs, 4, stage_devices=(0, 1, 1, 0))
        sums = list(map(sum, stages(costs, cuts)))
        self.assertEqual((sums[0] + sums[3], sums[1] + sums[2]), (7, 5))


class TiedTest(parameterized.TestCase):
    @parameterized.parameters((1.5, (1,)), (0.5, (2,)), (math.inf, (1,)))
    def test_layers_stay_together_where_their_exchange_costs_more(
        self, exchange, expected
    ):
        # Three layers on one device, or two and an exchange.
        cuts = partition([1, 1, 1, 1], 2, tied=[((1, 2), exchange)])
        self.assertEqual(cuts, expected)

    @parameterized.product(seed=tuple(range(20)), num_stages=(2, 3))
    def test_no_partition_of_two_tied_layers_is_better(self, seed, num_stages):
        rng = random.Random(seed)
        costs = [rng.randint(1, 9) for _ in range(8)]
        pair = sorted(rng.sample(range(8), 2))
        exchange = rng.randint(1, 9)

        def total(cuts):
            is_cut = any(pair[0] < cut <= pair[1] for cut in cuts)
            largest = max(map(sum, stages(costs, cuts)))
            return largest + exchange * is_cut

        found = partition(costs, num_stages, tied=[(pair, exchange)])
        self.assertEqual(
            total(found),
            min(
                map(total, itertools.combinations(range(1, 8), num_stages - 1))
            ),
        )

    def test_what_cannot_be_together_is_cut(self):
        # Each stage has a layer.
        cuts = partition([1, 1, 1, 1], 2, tied=[((0, 3), math.inf)])
        self.assertEqual(cuts, (2,))

    def test_together_has_to_fit(self):
        cuts = partition(
            [1, 1, 1, 1],
            2,
            tied=[((1, 2), 9)],
            memory=[LayerMemory(1, 0)] * 4,
            memory_limit=2,
        )
        self.assertEqual(cuts, (2,))

    def test_stages_of_one_device_exchange_nothing(self):
        # The first and the last stage of a V.
        costs, devices = [1, 1, 1, 1, 1, 1, 1, 1], (0, 1, 1, 0)
        apart = partition(costs, 4, stage_devices=devices)
        for layers in ((0, 7), (2, 5)):
            tied = partition(
                costs, 4, stage_devices=devices, tied=[(layers, math.inf)]
            )
            self.assertEqual(tied, apart)


if __name__ == "__main__":
    absltest.main()
