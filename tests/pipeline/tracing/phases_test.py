"""One traced function in phases: the same results, nothing done twice."""

import collections

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tfscale.pipeline.tracing.keys import Saved
from tfscale.pipeline.tracing.phases import PhaseSpec
from tfscale.pipeline.tracing.phases import needed_arguments
from tfscale.pipeline.tracing.phases import split

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 10.0
W = np.arange(12, dtype=np.float32).reshape(3, 4) / 10.0


class Traced:
    """tanh(x w), and its gradients by both where `g` is by its result."""

    def __init__(self, body=tf.tanh):
        self.arguments, self.results = {}, {}

        def trace():
            x, w, g = (
                tf.compat.v1.placeholder(tf.float32, shape, name)
                for name, shape in (("x", [2, 3]), ("w", [3, 4]), ("g", [2, 4]))
            )
            y = body(x @ w)
            by_x, by_w = tf.gradients(y, [x, w], g)
            self.arguments.update(x=x, w=w, g=g)
            self.results.update(y=y, by_x=by_x, by_w=by_w)

        self.wrapped = tf.compat.v1.wrap_function(trace, [])

    def parts(self, *names, **options):
        return [
            PhaseSpec(
                f"part_{number}",
                {name: self.results[name] for name in part.split()},
                **options.get(f"part_{number}", {}),
            )
            for number, part in enumerate(names)
        ]

    def split(self, *names, jit_compile=False, **options):
        return split(
            self.wrapped,
            self.arguments,
            self.parts(*names, **options),
            jit_compile=jit_compile,
        )


def run(phases):
    """Runs phases one after the other, on what there is by then."""
    tensors = {"x": tf.constant(X), "w": tf.constant(W), "g": tf.ones([2, 4])}
    for phase in phases:
        arguments = [tensors[key] for key in phase.inputs]
        tensors.update(zip(phase.outputs, phase.function(*arguments)))
    return tensors


def operations(phase):
    """How often each kind of operation is in a phase."""
    return collections.Counter(
        operation.type for operation in phase.function.graph.get_operations()
    )


def kept(phase):
    return [key for key in phase.outputs if isinstance(key, Saved)]


class PhasesTest(absltest.TestCase):
    def check(self, phases):
        tensors = run(phases)
        y = np.tanh(X @ W)
        np.testing.assert_allclose(tensors["y"], y, rtol=1e-6)
        inner = 1 - y**2
        np.testing.assert_allclose(tensors["by_x"], inner @ W.T, rtol=1e-5)
        np.testing.assert_allclose(tensors["by_w"], X.T @ inner, rtol=1e-5)

    def test_an_operation_is_in_the_first_phase_that_needs_it(self):
        forward, backward = phases = Traced().split("y", "by_x by_w")
        self.check(phases)
        self.assertEqual(operations(forward)["MatMul"], 1)
        self.assertEqual(operations(backward)["MatMul"], 2)
        self.assertEqual(operations(backward)["Tanh"], 0)
        # The result itself is what tanh's gradient needs: nothing more.
        self.assertEqual(forward.outputs, ("y",))
        self.assertCountEqual(backward.inputs, ["y", "x", "w", "g"])

    def test_a_third_phase_goes_on_from_both(self):
        phases = Traced().split("y", "by_x", "by_w")
        self.check(phases)
        _, inputs, weights = phases
        self.assertEqual(operations(weights)["TanhGrad"], 0)
        self.assertLen(kept(inputs), 1)
        self.assertCountEqual(weights.inputs, [*kept(inputs), "x"])

    def test_a_restart_keeps_nothing_and_computes_again(self):
        traced = Traced(lambda x: tf.tanh(tf.tanh(x) * 2.0))
        keeps, _ = traced.split("y", "by_x by_w")
        self.assertNotEmpty(kept(keeps))
        forward, backward = Traced().split(
            "y", "by_x by_w", part_1={"restart": True}
        )
        self.check([forward, backward])
        self.assertEqual(forward.outputs, ("y",))
        self.assertEqual(operations(backward)["Tanh"], 1)
        self.assertCountEqual(backward.inputs, ["x", "w", "g"])

    def test_what_a_restart_computes_again_still_comes_from_before_it(self):
        # The second phase takes from the first what the third one restarts.
        first, second, third = phases = Traced().split(
            "y", "by_x", "by_w", part_2={"restart": True}
        )
        self.check(phases)
        self.assertEqual(first.outputs, ("y",))
        self.assertIn("y", second.inputs)
        self.assertNotIn("y", third.inputs)

    def test_with_xla(self):
        self.check(Traced().split("y", "by_x by_w", jit_compile=True))

    def test_loops_stay_loops_and_may_be_split(self):
        def loop(x):
            return tf.while_loop(
                lambda i, _: i < 3,
                lambda i, x: (i + 1, tf.tanh(x)),
                [0, x],
                maximum_iterations=3,
            )[1]

        traced = Traced(loop)
        phases = traced.split("y", "by_x by_w")
        with tf.GradientTape() as tape:
            w = tf.constant(W)
            tape.watch(w)
            y = tf.tanh(tf.tanh(tf.tanh(X @ w)))
        tensors = run(phases)
        np.testing.assert_allclose(tensors["y"], y, rtol=1e-6)
        np.testing.assert_allclose(
            tensors["by_w"], tape.gradient(y, w), rtol=1e-5
        )
        for phase in phases:
            self.assertEqual(operations(phase)["StatelessWhile"], 1)
        self.assertNotEmpty(kept(phases[0]))

    def test_a_phase_may_have_nothing_to_do(self):
        traced = Traced()
        empty, forward = split(
            traced.wrapped,
            traced.arguments,
            [PhaseSpec("empty", {}), *traced.parts("y")],
        )
        self.assertEqual((empty.inputs, empty.outputs), ((), ()))
        self.assertNotIn("empty", run([empty, forward]))

    def test_what_is_asked_for_twice_or_given_is_returned(self):
        traced = Traced()
        traced.results["same"] = traced.results["y"]
        traced.results["given"] = traced.arguments["x"]
        tensors = run(traced.split("y", "same given"))
        np.testing.assert_array_equal(tensors["same"], tensors["y"])
        np.testing.assert_array_equal(tensors["given"], X)

    def test_tensors_from_outside_are_captured(self):
        variable = tf.Variable(3.0)
        traced = Traced(lambda x: tf.tanh(x) * variable)
        phases = traced.split("y", "by_x by_w")
        np.testing.assert_allclose(
            run(phases)["y"], 3.0 * np.tanh(X @ W), rtol=1e-6
        )
        variable.assign(5.0)
        np.testing.assert_allclose(
            run(phases)["y"], 5.0 * np.tanh(X @ W), rtol=1e-6
        )

    def test_side_effects_stay(self):
        found = []

        def body(x):
            small = tf.reduce_all(x < 0.5)
            found.append(tf.raw_ops.Assert(condition=small, data=[x]))
            return tf.tanh(x)

        traced = Traced(body)
        (forward,) = traced.split("y", part_0={"side_effects": found})
        with self.assertRaises(tf.errors.InvalidArgumentError):
            run([forward])

    def test_needed_arguments(self):
        traced = Traced()
        for name, needed in (("y", "xw"), ("by_w", "xwg")):
            self.assertEqual(
                needed_arguments([traced.results[name]], traced.arguments),
                set(needed),
            )


if __name__ == "__main__":
    absltest.main()
