"""An exported model runs on the devices of its mesh, and without tfscale."""

import collections
import json
import os
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import tfscale

# As TensorFlow Serving loads: a session of TensorFlow 1, and the signature.
SESSION = """
import collections, json, sys
import numpy as np
import tensorflow as tf

path, feeds, num_devices, soft = sys.argv[1:5]
v1 = tf.compat.v1
config = v1.ConfigProto(
    device_count={"CPU": int(num_devices)}, allow_soft_placement=soft == "soft"
)
with v1.Session(graph=tf.Graph(), config=config) as session:
    loaded = v1.saved_model.loader.load(session, ["serve"], path)
    signature = loaded.signature_def["serving_default"]
    feeds = np.load(feeds)
    metadata = v1.RunMetadata()
    results = session.run(
        {name: info.name for name, info in signature.outputs.items()},
        {signature.inputs[name].name: feeds[name] for name in feeds},
        options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE),
        run_metadata=metadata,
    )
products = collections.Counter(
    device.device[-5:]
    for device in metadata.step_stats.dev_stats
    for node in device.node_stats
    if "MatMul" in node.node_name + node.timeline_label
)
assert "tfscale" not in sys.modules
results = {name: value.tolist() for name, value in results.items()}
print(json.dumps({"results": results, "products": products}))
"""
# As Python loads, with the variables where they were.
LOADED = """
import json, sys
import numpy as np
import tensorflow as tf

path, feeds, num_devices, _ = sys.argv[1:5]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * int(num_devices),
)
policy = tf.saved_model.experimental.VariablePolicy.SAVE_VARIABLE_DEVICES
options = tf.saved_model.LoadOptions(experimental_variable_policy=policy)
model = tf.saved_model.load(path, options=options)
feeds = np.load(feeds)
results = model.signatures["serving_default"](
    **{name: tf.constant(feeds[name]) for name in feeds}
)
sizes = {}
for variable in model.values:
    if not variable.dtype.is_floating:
        continue  # seeds, which a pipeline passes through
    size = int(np.prod(variable.shape))
    sizes[variable.device[-5:]] = sizes.get(variable.device[-5:], 0) + size
assert "tfscale" not in sys.modules
results = {name: value.numpy().tolist() for name, value in results.items()}
print(json.dumps({"results": results, "sizes": sizes}))
"""
# Imports TensorFlow once, and runs each program in a fork.
SERVER = """
import json, os, sys, traceback
import numpy
import tensorflow

for line in sys.stdin:
    program, arguments, output, errors = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        for number, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        try:
            sys.argv[1:] = arguments
            exec(program, {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
LAYOUTS = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}


def feeds():
    random = np.random.RandomState(0)
    return {name: random.normal(size=(7, 8)).astype("float32") for name in "ab"}


def build():
    """Two inputs and two outputs, and statistics that only `predict` uses."""
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    x = keras.layers.Dense(16, "relu", name="up")(a)
    x = keras.layers.Dense(8, name="down")(x)
    x = keras.layers.Add()([keras.layers.Dropout(0.5)(x), b])
    x = keras.layers.BatchNormalization()(x)
    one = keras.layers.Dense(3, name="one")(x)
    two = keras.layers.Dense(2, name="two")(x)
    return keras.Model({"a": a, "b": b}, {"one": one, "two": two})


def on_mesh(build=build, **axes):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    mesh = tfscale.device_mesh(**axes)
    layouts = LAYOUTS if "model" in axes else None
    with tfscale.MeshStrategy(mesh, layouts).scope():
        model = build()
        if "pipeline" in axes:
            model = tfscale.PipelineModel(model, num_microbatches=3)
        model.compile("sgd", "mse")
    return model


class ExportTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env={**os.environ, "PYTHONPATH": ""},
            cwd=tempfile.gettempdir(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @classmethod
    def tearDownClass(cls):
        cls.server.communicate()
        super().tearDownClass()

    def setUp(self):
        super().setUp()
        self.folder = self.create_tempdir().full_path
        self.path = os.path.join(self.folder, "exported")
        self.feeds = feeds()

    def run_program(self, program, num_devices, soft="hard"):
        file = os.path.join(self.folder, "feeds.npz")
        np.savez(file, **self.feeds)
        arguments = [self.path, file, str(num_devices), soft]
        paths = [self.create_tempfile().full_path for _ in ("output", "errors")]
        line = json.dumps([program, arguments, *paths])
        self.server.stdin.write(f"{line}\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        texts = []
        for path in paths:
            with open(path) as text:
                texts.append(text.read())
        return subprocess.CompletedProcess(arguments, code, *texts)

    def found(self, process):
        self.assertEqual(process.returncode, 0, process.stderr)
        return json.loads(process.stdout.splitlines()[-1])

    def assert_predicted(self, found, expected):
        self.assertCountEqual(found, expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(
                np.array(found[name], "float32"), value
            )

    @parameterized.parameters(
        ({"pipeline": 2, "model": 2},), ({"pipeline": 2},), ({"model": 2},)
    )
    @pytest.mark.crossing(every=3)
    def test_runs_on_the_devices_of_its_mesh(self, axes):
        model = on_mesh(**axes)
        targets = {"one": np.ones((7, 3)), "two": np.ones((7, 2))}
        model.fit(self.feeds, targets, verbose=0)
        expected = model.predict(self.feeds, verbose=0)
        tfscale.export(model, self.path)
        num_devices = int(np.prod(list(axes.values())))
        found = self.found(self.run_program(SESSION, num_devices))
        self.assert_predicted(found["results"], expected)
        self.assertLen(found["products"], num_devices)
        found = self.found(self.run_program(LOADED, num_devices))
        self.assert_predicted(found["results"], expected)
        sizes = collections.Counter()
        for variable in model.weights:
            for part in model.distribute_strategy.experimental_local_results(
                variable.value
            ):
                sizes[part.device[-5:]] += int(np.prod(part.shape))
        self.assertEqual(found["sizes"], sizes)
        # Exporting changes nothing: the same model predicts and trains on.
        self.assert_predicted(model.predict(self.feeds, verbose=0), expected)
        model.fit(self.feeds, targets, verbose=0)

    def test_fewer_devices_are_an_error_or_softly_placed(self):
        model = on_mesh(pipeline=2)
        expected = model.predict(self.feeds, verbose=0)
        tfscale.export(model, self.path)
        found = self.found(self.run_program(SESSION, 1, "soft"))
        self.assert_predicted(found["results"], expected)
        self.assertLen(found["products"], 1)
        process = self.run_program(SESSION, 1)
        self.assertNotEqual(process.returncode, 0)
        self.assertIn("CPU:1", process.stderr)

    def test_one_input_and_one_output(self):
        def build():
            hidden = keras.layers.Dense(4, name="up")
            return keras.Sequential(
                [keras.Input((8,)), hidden, keras.layers.Dense(3)]
            )

        self.assert_served(on_mesh(build, pipeline=2), self.feeds["a"])

    def test_lists_in_a_dict_of_outputs_are_numbered(self):
        # A signature takes no lists: an error of TensorFlow's.
        def build():
            inputs = keras.Input((8,), name="a")
            hidden = keras.layers.Dense(4)(inputs)
            heads = [keras.layers.Dense(n)(hidden) for n in (2, 3)]
            return keras.Model(inputs, {"heads": heads, "hidden": hidden})

        model = on_mesh(build, pipeline=2)
        expected = model.predict(self.feeds["a"], verbose=0)
        self.feeds = {"a": self.feeds["a"]}
        tfscale.export(model, self.path)
        found = self.found(self.run_program(LOADED, 2))
        first, second = expected["heads"]
        outputs = [first, second, expected["hidden"]]
        names = [f"output_{i}" for i in range(3)]
        self.assert_predicted(found["results"], dict(zip(names, outputs)))

    @parameterized.parameters({"pipeline": 2}, {})
    @pytest.mark.crossing(every=2)
    def test_tables_of_strings(self, **axes):
        # They were left out of the SavedModel, which was an error of
        # TensorFlow.
        def build():
            words = keras.Input((), dtype="string", name="words")
            lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
            x = keras.layers.Embedding(3, 8)(lookup(words))
            return keras.Model(words, keras.layers.Dense(2)(x))

        model = on_mesh(build, **axes)
        tfscale.export(model, self.path)
        self.feeds = {"words": np.array(["b", "a", "other", "b"], "S5")}
        expected = model.predict(tf.constant(self.feeds["words"]), verbose=0)
        for program in (SESSION, LOADED):
            found = self.found(self.run_program(program, 2))
            self.assert_predicted(found["results"], {"output_0": expected})

    @pytest.mark.crossing
    def test_loops_in_a_stage(self):
        # TensorFlow traced their gradients again, under names that were taken.
        def build():
            return keras.Sequential(
                [
                    keras.Input((None, 4)),
                    keras.layers.LSTM(5, return_sequences=True),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(3),
                ]
            )

        rows = self.feeds["a"].reshape(7, 2, 4)
        self.assert_served(on_mesh(build, pipeline=2), rows)

    @pytest.mark.crossing
    def test_int8_on_stages_and_ranks(self):
        def build_int8():
            model = build()
            model.quantize("int8", filters="up|down|one|two")
            return model

        expected = on_mesh(build_int8, pipeline=2, model=2).predict(
            self.feeds, verbose=0
        )
        model = on_mesh(pipeline=2, model=2)
        model.model.quantize("int8", filters="up|down|one|two")
        tfscale.export(model, self.path)
        found = self.found(self.run_program(SESSION, 4))
        self.assert_predicted(found["results"], expected)
        self.assertLen(found["products"], 4)

    def assert_served(self, model, x):
        tfscale.export(model, self.path)
        loaded = tf.saved_model.load(self.path)
        serve = loaded.signatures["serving_default"]
        [results] = serve(tf.constant(x)).values()
        np.testing.assert_array_equal(results, model.predict(x, verbose=0))

    def refuse(self, error, text, model):
        with self.assertRaisesRegex(error, text):
            tfscale.export(model, self.path)
        self.assertFalse(os.path.exists(self.path))

    def test_a_folder_that_cannot_be_read_is_refused(self):
        # It was written, and TensorFlow found none of its variables.
        model = on_mesh(pipeline=1)
        folder = self.path
        for name in ("run[1]", "back\\slash"):
            self.path = os.path.join(folder, name)
            self.refuse(ValueError, "path=.*(run.1|slash)", model)

    def test_several_replicas_are_refused(self):
        self.refuse(ValueError, "one replica.*data=2", on_mesh(data=2))

    def test_an_export_of_shards_for_one_device_names_both_exports(self):
        model = on_mesh(pipeline=2, model=2)
        with self.assertRaisesRegex(
            ValueError,
            r"'(up|down)/(kernel|bias)', in 2 shards.*`tfscale.export\(model, "
            r"path\)`.*one device, save it with `model.save\(path\)`",
        ):
            model.export(self.path, verbose=False)

    def test_a_model_on_no_mesh_is_refused(self):
        keras.utils.clear_session()
        self.refuse(ValueError, r"Use `model.export\(path\)`", build())

    def test_a_model_without_inputs_is_refused(self):
        class Plain(keras.Model):
            def call(self, x):
                return x

        model = on_mesh(Plain, data=1)
        self.refuse(ValueError, "shapes of its inputs.*'plain'", model)
        model = on_mesh(lambda: keras.Sequential([Plain()]), data=1)
        self.refuse(ValueError, "shapes of its inputs.*'sequential'", model)

    def test_what_is_no_model_is_refused(self):
        layer = keras.layers.Dense(2)
        self.refuse(TypeError, "takes a Keras model.*Dense", layer)
