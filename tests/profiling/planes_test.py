"""Planes as TensorFlow writes them, made by hand.

Those of GPUs are after what TensorFlow documents: lines of streams with
kernels and copies, whose `tf_op` is the operation, and lines that repeat them.
"""

from absl.testing import absltest

from tfscale._internals import symbols
from tfscale.profiling import planes
from tfscale.profiling.breakdown import shares


class Space:
    """An `XSpace` that is built by lines of `(name, begin, end, stats)`."""

    def __init__(self):
        self.space = symbols.xplane_pb2.XSpace()

    def plane(self, name, lines):
        plane = self.space.planes.add(name=name)
        for title, events in lines.items():
            # Times of a line count from its own beginning, in nanoseconds.
            line = plane.lines.add(name=title, timestamp_ns=7)
            for name, begin, end, stats in events:
                number = len(plane.event_metadata) + 1
                metadata = plane.event_metadata[number]
                metadata.id, metadata.name = number, name
                if "/" in name and ":" in name:
                    metadata.display_name = name.rsplit(":", 1)[1]
                event = line.events.add(metadata_id=number)
                event.offset_ps = begin * 1000
                event.duration_ps = (end - begin) * 1000
                for key, value in stats.items():
                    found = len(plane.stat_metadata) + 1
                    plane.stat_metadata[found].name = key
                    stat = event.stats.add(metadata_id=found)
                    if isinstance(value, str):
                        stat.str_value = value
                    else:
                        stat.int64_value = value


def key(source, target):
    prefix = "/job:localhost/replica:0/task:0/device:CPU:"
    return f"{prefix}{source};1f;{prefix}{target};edge;0:0"


def axis_of(source, target):
    return f"{source}>{target}" if source else "data"


class PlanesTest(absltest.TestCase):
    def test_operations_of_the_step_on_their_devices(self):
        made = Space()
        made.plane(
            "/host:CPU",
            {
                "python": [
                    ("tfscale_step", 0, 100, {}),
                    ("FunctionRun", 1, 2, {"_p": 11}),
                    ("FunctionRun", 3, 4, {"_p": -12}),
                ],
                "one": [
                    ("ExecutorState::Process", 5, 50, {"_c": 11}),
                    ("m/dense/MatMul:MatMul", 6, 30, {}),
                    ("m/x/_1:_Send", 30, 35, {"key": key(0, 1)}),
                    ("m/y/_1:_Send", 36, 38, {"key": key(0, 0)}),
                ],
                "two": [
                    ("ExecutorState::Process", 5, 90, {"_c": -12}),
                    ("m/z/_1:_Send", 10, 11, {"key": key(1, 0)}),
                    # A function within the part.
                    ("FunctionRun", 20, 60, {"_p": 13}),
                    ("ExecutorState::Process", 21, 59, {"_c": 13}),
                    ("m/dense_1/Relu:Relu", 22, 42, {}),
                ],
                # A thread that was within the first part at the end.
                "three": [
                    ("m/dense/MatMul:MatMul", 80, 99, {}),
                    ("m/unknown/Mul:Mul", 80, 99, {}),
                ],
                "data": [
                    (
                        "IteratorGetNextOp::DoCompute",
                        60,
                        80,
                        {"element_size": 96},
                    ),
                    # A function of the dataset.
                    ("FunctionRun", 1, 2, {"_p": 14}),
                    ("ExecutorState::Process", 5, 50, {"_c": 14}),
                    ("m/decode/Mul:Mul", 6, 49, {}),
                ],
            },
        )
        recording = planes.read_space(made.space, axis_of)
        found = [
            (event.device, event.begin, event.end, event.name, event.axis)
            for event in recording.events
        ]
        one, two = "task:0/CPU:0", "task:0/CPU:1"
        self.assertEqual(
            found,
            [
                (one, 13_000, 37_000, "m/dense/MatMul", None),
                (one, 37_000, 42_000, "m/x/_1", f"{one}>{two}"),
                (two, 17_000, 18_000, "m/z/_1", f"{two}>{one}"),
                (two, 29_000, 49_000, "m/dense_1/Relu", None),
                (one, 87_000, 106_000, "m/dense/MatMul", None),
            ],
        )
        self.assertEqual(recording.steps, [(7_000, 107_000)])
        self.assertEqual(recording.inputs, [(67_000, 87_000)])
        self.assertEqual(recording.num_bytes, 96)
        self.assertAlmostEqual(shares(recording)[one].input_wait, 0.2)

    def test_a_step_that_xla_compiles_on_one_cpu(self):
        made = Space()
        hlo = {"hlo_op": "MatMul.12"}
        made.plane(
            "/host:CPU",
            {
                "python": [("tfscale_step", 0, 100, {})],
                "Eigen": [
                    ("ThunkExecutor::Execute", 0, 90, {}),
                    ("MatMul.12", 20, 70, hlo),
                ],
            },
        )
        found = shares(planes.read_space(made.space, axis_of, "CPU:2"))
        self.assertEqual(list(found), ["task:0/CPU:2"])
        self.assertEqual(found["task:0/CPU:2"].compute, 0.5)

    def test_streams_of_gpus(self):
        made = Space()
        made.plane("/host:CPU", {"python": [("tfscale_step", 0, 100, {})]})
        made.plane(
            "/device:GPU:1",
            {
                "Stream #13(Compute)": [
                    ("sgemm_128", 0, 40, {"tf_op": "m/dense/MatMul:MatMul"}),
                ],
                "Stream #14(Nccl)": [
                    ("ncclDevKernel_AllReduce_Sum_f32", 30, 50, {}),
                ],
                "Stream #15(MemcpyH2D)": [("MemcpyH2D", 60, 70, {})],
                "Stream #16(MemcpyP2P)": [("MemcpyP2P", 70, 75, {})],
                "Stream #17(MemcpyD2D)": [("MemcpyD2D", 75, 80, {})],
                # Repeats of the above.
                "TensorFlow Ops": [("MatMul", 0, 100, {})],
                "Steps": [("1", 0, 100, {})],
            },
        )
        recording = planes.read_space(made.space, axis_of, "GPU:0", task=2)
        (device,) = {event.device for event in recording.events}
        self.assertEqual(device, "task:2/GPU:1")
        self.assertEqual(recording.events[0].name, "m/dense/MatMul")
        found = shares(recording)[device]
        self.assertAlmostEqual(found.compute, 0.45)
        self.assertEqual(found.communication, {"data": 0.25, "host": 0.1})
        self.assertAlmostEqual(found.both, 0.1)
        self.assertAlmostEqual(found.idle, 0.3)


if __name__ == "__main__":
    absltest.main()
