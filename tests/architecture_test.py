import ast
import fnmatch
import functools
import glob
import importlib
import inspect
import os
import pkgutil
import re
import sys

import keras
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests import source_files

REPOSITORY = source_files.REPOSITORY
INTERNALS = "tfscale/_internals/"
# With the test of serialization that Keras holds its own classes to.
KERAS_OWN_TESTS = "keras.src.testing"

# Planning with integers: no device, no tensor, tested in milliseconds.
PURE = (
    "tfscale/cluster/cluster.py",
    "tfscale/cluster/environment.py",
    "tfscale/cluster/ports.py",
    "tfscale/cluster/preflight.py",
    "tfscale/cluster/reception.py",
    "tfscale/cluster/rendezvous.py",
    "tfscale/collectives/costs.py",
    "tfscale/forks.py",
    "tfscale/formatting.py",
    "tfscale/free_memory.py",
    "tfscale/integers.py",
    "tfscale/profiling/breakdown.py",
    "tfscale/profiling/layer_times.py",
    "tfscale/profiling/planes.py",
    "tfscale/profiling/report.py",
    "tfscale/schedules/__init__.py",
    "tfscale/schedules/action.py",
    "tfscale/schedules/balance.py",
    "tfscale/schedules/cut_points.py",
    "tfscale/schedules/list_schedule.py",
    "tfscale/schedules/looped_schedules.py",
    "tfscale/schedules/named_schedules.py",
    "tfscale/schedules/schedule.py",
    "tfscale/schedules/simulate.py",
    "tfscale/schedules/steady.py",
    "tfscale/schedules/timeline.py",
    "tfscale/schedules/v_schedules.py",
    "tfscale/step_memory.py",
    "tfscale/planner/cost.py",
    "tfscale/planner/device.py",
    "tfscale/planner/goodput.py",
    "tfscale/planner/layers.py",
    "tfscale/planner/report.py",
    "tfscale/planner/search.py",
    "tfscale/planner/schedule_cost.py",
    "tfscale/variables/gather_window.py",
    "tfscale/variables/sharding.py",
    "tfscale/tensor_parallel/layouts/layouts.py",
)
# What a pure file may import beside the standard library and its like.
PURE_PACKAGES = ("matplotlib", "numpy", "rich")

# What gives frames of Python's call stack, or goes on from one.
_OF_STACK = (
    *("_current_frames", "_getframe", "currentframe", "getouterframes"),
    *("f_back", "f_globals", "f_locals"),
)
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
# Words of earlier code that a reader had to look up, each for several things.
# What Keras and its peers say: indices, coordinates, shard, local, boundary,
# capture, probe, worker group, wrapped.
_PRIVATE_WORDS = {
    *("behind", "company", "crossed", "crossing", "dear", "did", "face"),
    *("likewise", "looks", "meeting", "own", "part", "parts", "place"),
    *("places", "said", "settle", "survey", "taken", "unread", "whoever"),
}
# Of the standard library, of Keras, and of what tfscale puts on instances.
_KNOWN_NAMES = {
    *("hugging_face", "hugging_face_source", "in_place"),
    *("load_own_variables", "save_own_variables"),
}
_SETTERS = ("setattr", "delattr", "__set__")
_DESCRIPTIONS = ("node", "options", "config", "graph.nodes()")
# Every place where something of Keras or TensorFlow is changed at run time.
CHANGED_OF_KERAS = {
    ("tfscale/_internals/datasets.py", "spec.__class__"),
    ("tfscale/_internals/fitting.py", "bar.target"),
    ("tfscale/_internals/releases.py", "setattr of adapter"),
    ("tfscale/_internals/attributes.py", "variable._value"),
    (
        "tfscale/_internals/attributes.py",
        "context.coordination_service.cluster_register_with_barrier",
    ),
    ("tfscale/adapters/model.py", "in_place.put of compile_loss"),
    ("tfscale/adapters/layer.py", "in_place.put of layer"),
    ("tfscale/adapters/compiled_model.py", "in_place.put of model"),
    ("tfscale/adapters/shared_model.py", "in_place.put of model"),
    ("tfscale/adapters/model.py", "in_place.put of model"),
    (
        "tfscale/adapters/mirrored_strategy.py",
        "in_place.put of strategy.extended",
    ),
    ("tfscale/_internals/attributes.py", "component._unique_id"),
    ("tfscale/_internals/attributes.py", "graph._add_control_dependencies"),
    ("tfscale/adapters/epochs.py", "in_place.put of epochs"),
    ("tfscale/callbacks/layer_freezing.py", "layer.trainable"),
    ("tfscale/comparison/training.py", "setattr of layer"),
    ("tfscale/_internals/fitting.py", "epochs._current_iterator"),
    ("tfscale/_internals/fitting.py", "epochs.data_adapter"),
    ("tfscale/_internals/fitting.py", "epochs._num_batches"),
    ("tfscale/_internals/fitting.py", "epochs._distributed_dataset"),
    ("tfscale/_internals/fitting.py", "epochs._steps_seen"),
    ("tfscale/_internals/fitting.py", "model._initial_epoch"),
    ("tfscale/adapters/py_dataset.py", "in_place.put of shuffling"),
    ("tfscale/backup/state/callback_states.py", "logger.append"),
    ("tfscale/backup/state/callback_states.py", "logger.append_header"),
    ("tfscale/backup/state/callback_states.py", "logger.keys"),
    ("tfscale/backup/state/callback_states.py", "setattr of callback"),
    ("tfscale/adapters/function.py", "in_place.put of step"),
    ("tfscale/callbacks/batch_adapter.py", "optimizer.learning_rate"),
    ("tfscale/adapters/metric.py", "in_place.put of metric"),
    ("tfscale/adapters/optimizer.py", "in_place.put of optimizer"),
    ("tfscale/adapters/row_optimizer.py", "in_place.put of optimizer"),
    ("tfscale/_internals/in_place.py", "_CLASS.__set__ of instance"),
    ("tfscale/_internals/in_place.py", "setattr of instance"),
    ("tfscale/graphs/function_options.py", "context.function_call_options"),
    (
        "tfscale/graphs/function_options.py",
        "changed.config_proto_serialized",
    ),
    (
        "tfscale/tensor_parallel/analysis.py",
        "_functional(model).sharding_decision",
    ),
    ("tfscale/adapters/mirrored_strategy.py", "in_place.put of context"),
    ("tfscale/adapters/seed_generator.py", "in_place.put of generator"),
    (
        "tfscale/tensor_parallel/rules/sharded_call.py",
        "self._layer.input_spec",
    ),
}

# Packages and modules of `tfscale`, lowest first: each imports from those
# before it only.
LAYERS = (
    "_version",
    "_version_check",
    "_internals",
    "formatting",
    "forks",
    "free_memory",
    "integers",
    "step_memory",
    "graphs",
    "schedules",
    "context",
    "cluster",
    "collectives",
    "fit",
    "optimizers",
    "adapters",
    "variables",
    "tensor_parallel",
    "step",
    "mesh",
    "accumulation",
    "data",
    "backup",
    "pipeline",
    "planner",
    "throughput",
    "profiling",
    "layers",
    "losses",
    "serving",
    "comparison",
    "callbacks",
    "parameter_server",
    "__init__",
    "launch",
    "selfcheck",
)

CONFIGS = sorted(
    os.path.basename(path)
    for path in glob.glob(os.path.join(REPOSITORY, "configs", "*"))
)


def _package_files():
    return [
        path
        for path in source_files.python_files()
        if path.startswith("tfscale/")
    ]


def _changes():
    """`(path, target)` of what is changed on objects that are not ours."""
    trees = {path: source_files.parse(path) for path in _package_files()}
    own = {name for tree in trees.values() for name in _attributes_of(tree)}
    own -= {*dir(keras.Model), *dir(keras.Optimizer), *dir(tf.Variable)}
    for path, tree in trees.items():
        for target in _changes_in(tree, own):
            yield path, target


def _attributes_of(tree):
    """Attributes that classes of a module set or declare."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.AnnAssign | ast.Assign):
                    yield ast.unparse(part).split(":")[0].split(" =")[0]
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            yield node.attr


def _changes_in(tree, own):
    """What is changed, by attributes that are not those of `own` classes."""
    ours = {n.name for n in ast.walk(tree) if isinstance(n, _DEFINITIONS)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func)
            if function.split(".")[-1] in _SETTERS or (
                function == "in_place.put"
            ):
                changed = ast.unparse(node.args[0])
                if changed not in ours:
                    yield f"{function} of {changed}"
            continue
        if isinstance(node, ast.Subscript):
            target = node.value
            if not ast.unparse(target).endswith(("__dict__", "vars")):
                continue
        else:
            target = node
        if (
            isinstance(target, ast.Attribute)
            and not isinstance(node.ctx, ast.Load)
            and target.attr not in own
        ):
            of = ast.unparse(target.value)
            # What describes graphs and options to TensorFlow is made here.
            if of not in ("self", "_thread", *ours) and not of.startswith(
                _DESCRIPTIONS
            ):
                yield ast.unparse(target)


def _identifiers(path):
    """The names that a module defines, and its own."""
    yield os.path.basename(path).removesuffix(".py")
    for node in ast.walk(source_files.parse(path)):
        if isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(
            node.ctx, ast.Store
        ):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _used_names(path):
    """Dotted names of the package that a file imports, or reads of a module."""
    modules = {}
    for name in source_files.imported_names(path):
        if name.split(".")[0] == "tfscale":
            yield name
            modules[name.split(".")[-1]] = name
    for node in ast.walk(source_files.parse(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module in sys.modules:
                yield f"{module}.{node.attr}"


def _is_there(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def _layer(path):
    """The place in `LAYERS` of the package, or the module, that has a file."""
    return LAYERS.index(path.split("/")[1].removesuffix(".py"))


@functools.cache
def public_names():
    """(package, name) for each name in `__all__` of tfscale's packages."""
    packages = [
        os.path.dirname(path).replace("/", ".")
        for path in _package_files()
        if path.endswith("/__init__.py") and "/_" not in os.path.dirname(path)
    ]
    return [
        (package, name)
        for package in packages
        for name in importlib.import_module(package).__all__
    ]


class LayersTest(absltest.TestCase):
    def test_planning_imports_neither_tensorflow_nor_keras(self):
        for path in PURE:
            self.assertIn(path, source_files.python_files())
            for name in source_files.imported_names(path):
                package = name.split(".")[0]
                if package != "tfscale":
                    self.assertIn(
                        package,
                        {*PURE_PACKAGES, *sys.stdlib_module_names},
                        f"{path} imports {name}",
                    )
            for file in source_files.imported_files(path):
                if file.startswith("tfscale/"):
                    self.assertIn(file, PURE, f"{path} imports {file}")

    def test_the_mesh_knows_nothing_of_strategies(self):
        path = os.path.join(REPOSITORY, "tfscale/mesh/device_mesh.py")
        with open(path) as file:
            self.assertNotIn("tf.distribute", file.read())

    def test_private_symbols_come_through_one_door(self):
        for path in source_files.python_files():
            for name in source_files.imported_names(path):
                if path.startswith(INTERNALS) or name == KERAS_OWN_TESTS:
                    continue
                if name.startswith(("tensorflow.python", "keras.src")):
                    self.fail(f"{path} imports {name}: only {INTERNALS} may")
            # Symbols reached without an import count as well.
            for node in ast.walk(source_files.parse(path)):
                if isinstance(node, ast.Attribute) and isinstance(
                    node.value, ast.Name
                ):
                    self.assertNotRegex(
                        f"{node.value.id}.{node.attr}",
                        r"^(tf|tensorflow)\.(python|__internal__)$"
                        r"|^keras\.src$"
                        r"|^tf\.keras$",
                        f"{path}:{node.lineno}",
                    )

    def test_what_is_changed_of_keras_is_listed(self):
        self.assertEqual(set(_changes()), CHANGED_OF_KERAS)
        with open(os.path.join(REPOSITORY, "CONTRIBUTING.md")) as file:
            listed = file.read()
        for path, _ in CHANGED_OF_KERAS:
            self.assertIn(f"`{path.removeprefix('tfscale/')}`", listed)

    def test_a_change_is_seen(self):
        for code in (
            "keras.Model.load_weights = load",
            "layer.call = call",
            "optimizer.apply = apply",
            "layer.__class__ = Other",
            "setattr(layer, name, value)",
            "delattr(keras.layers, 'Dense')",
            "in_place.put(layer, Mixin)",
            "layer.__dict__['call'] = call",
            "del keras.layers.Dense",
        ):
            self.assertLen(list(_changes_in(ast.parse(code), set())), 1, code)

    def test_what_benchmarks_and_examples_import_is_there(self):
        # No test runs all of them.
        found = [
            f"{path}: {name}"
            for path in source_files.python_files()
            if path.startswith(("benchmarks/", "examples/"))
            for name in _used_names(path)
            if not _is_there(name)
        ]
        self.assertEqual(found, [])

    def test_each_package_has_a_layer(self):
        names = {path.split("/")[1] for path in _package_files()}
        names = {name.removesuffix(".py") for name in names}
        self.assertCountEqual(LAYERS, names)

    def test_imports_go_down_only(self):
        for path in _package_files():
            for file in source_files.imported_files(path):
                self.assertLessEqual(
                    _layer(file), _layer(path), f"{path} imports {file}"
                )

    def test_imports_have_no_cycle(self):
        done, under_way = set(), []

        def visit(path):
            if path in under_way:
                self.fail(" -> ".join([*under_way, path]))
            if path not in done:
                under_way.append(path)
                for file in source_files.imported_files(path):
                    visit(file)
                done.add(under_way.pop())

        for path in source_files.python_files():
            visit(path)

    def test_every_folder_of_the_package_is_a_package(self):
        # setuptools leaves the others out of the wheel, without a word.
        for path in _package_files():
            init = os.path.join(os.path.dirname(path), "__init__.py")
            self.assertIn(init, source_files.python_files())

    def test_classes_are_put_in_place_by_adapters_only(self):
        for path, change in CHANGED_OF_KERAS:
            if change.startswith("in_place."):
                self.assertStartsWith(path, "tfscale/adapters/")

    def test_one_module_reads_the_stack_of_python(self):
        readers = {
            path
            for path in _package_files()
            for node in ast.walk(source_files.parse(path))
            if isinstance(node, ast.Attribute | ast.Name)
            and getattr(node, "attr", getattr(node, "id", "")) in _OF_STACK
        }
        self.assertEqual(readers, {"tfscale/_internals/stack.py"})

    def test_identifiers_have_the_words_of_the_field(self):
        for path in _package_files():
            for name in _identifiers(path):
                words = re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name)
                if name not in _KNOWN_NAMES:
                    self.assertNoCommonElements(
                        map(str.lower, words), _PRIVATE_WORDS, f"{path}: {name}"
                    )

    def test_the_library_defines_no_flags(self):
        # But for the launcher, which is a program.
        programs = ("tfscale/launch/__main__.py",)
        for path in set(_package_files()) - set(programs):
            for name in source_files.imported_names(path):
                self.assertFalse(name.startswith("absl.flags"), path)


class ContributingTest(absltest.TestCase):
    def test_the_files_that_it_names_are_there(self):
        with open(os.path.join(REPOSITORY, "CONTRIBUTING.md")) as file:
            named = set(re.findall(r"`([\w/]+\.py)`", file.read()))
        self.assertNotEmpty(named)
        for name in named:
            self.assertTrue(
                any(
                    f"/{path}".endswith(f"/{name}")
                    for path in source_files.python_files()
                ),
                name,
            )


class TestsTest(absltest.TestCase):
    def test_a_test_of_a_module_is_where_the_module_is(self):
        folders = {}
        for path in _package_files():
            folder, name = os.path.split(path.removeprefix("tfscale/"))
            folders.setdefault(name.removesuffix(".py"), []).append(folder)
        for path in source_files.python_files():
            if path.startswith("tests/") and path.endswith("_test.py"):
                folder, name = os.path.split(path.removeprefix("tests/"))
                package = folder.split("/")[0]
                of_module = [
                    f
                    for f in folders.get(name.removesuffix("_test.py"), ())
                    if f.split("/")[0] == package
                ]
                if of_module:
                    self.assertIn(folder, of_module, path)

    def test_a_marker_is_below_the_parameters(self):
        # Above them it is lost: all cases ran always.
        for path in source_files.python_files():
            if path.startswith("tests/") and path.endswith("_test.py"):
                for node in ast.walk(source_files.parse(path)):
                    if isinstance(node, ast.FunctionDef):
                        names = map(ast.unparse, node.decorator_list)
                        is_marker = [n.startswith("pytest.mark") for n in names]
                        self.assertEqual(is_marker, sorted(is_marker), path)


class BuildFileTest(absltest.TestCase):
    def test_every_file_is_in_a_target(self):
        # BUILD is written in a part of Python: it runs with stand-ins.
        rules, files = [], set()

        def find(include, exclude=()):
            found = set()
            for pattern in include:
                paths = glob.glob(pattern, root_dir=REPOSITORY, recursive=True)
                found.update(
                    path
                    for path in paths
                    if not any(
                        fnmatch.fnmatch(path, out.replace("**/", "*"))
                        for out in exclude
                    )
                )
            return sorted(found)

        def rule(name, srcs=(), deps=(), main=None, **_):
            rules.append((name, [dep[1:] for dep in deps]))
            if main is not None:
                self.assertIn(main, srcs)
            if name != "repository":
                files.update(srcs)

        with open(os.path.join(REPOSITORY, "BUILD")) as file:
            exec(
                file.read(),
                dict.fromkeys(
                    ("load", "package", "licenses", "exports_files"),
                    lambda *_, **__: None,
                )
                | dict.fromkeys(
                    ("filegroup", "py_library", "py_binary", "py_test"), rule
                )
                | {"glob": find},
            )
        names = [name for name, _ in rules]
        self.assertLen(set(names), len(names))
        for name, deps in rules:
            self.assertContainsSubset(deps, names, name)
        self.assertSameElements(files, source_files.python_files())


class PublicNamesTest(absltest.TestCase):
    def test_every_public_name_has_a_docstring_with_an_example(self):
        for package, name in public_names():
            value = getattr(importlib.import_module(package), name)
            if inspect.isclass(value) or inspect.isfunction(value):
                with self.subTest(name=f"{package}.{name}"):
                    self.assertTrue(value.__doc__)
                    self.assertIn(">>> ", value.__doc__)


class ConfigsTest(parameterized.TestCase):
    # absl's `--only_check_flags` leaves before it has looked for unknown flags
    # and asked the validators; `--only_check_args` does both.
    FLAGS = ("--only_check_flags", "--only_check_args")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        commands = [
            (*cls.command(config), flag)
            for config in CONFIGS
            for flag in cls.FLAGS
        ]
        # What has to be refused, or the others would prove nothing.
        commands.append((*cls.command(CONFIGS[0]), "--no_such", cls.FLAGS[1]))
        cls.results = {
            command: forked_python.run(["-m", *command], REPOSITORY)
            for command in commands
        }

    @staticmethod
    def command(config):
        """Module and arguments of the command in a config's first line."""
        with open(os.path.join(REPOSITORY, "configs", config)) as file:
            first_line = file.readline()
        command = re.fullmatch(
            r"# python -m ([\w.]+) (--flagfile=configs/([\w.]+))\n", first_line
        )
        if command is None or command.group(3) != config:
            raise ValueError(f"{config} begins with {first_line!r}")
        return command.groups()[:2]

    @parameterized.product(config=CONFIGS, flag=FLAGS)
    def test_every_config_is_valid_for_the_example_that_it_names(
        self, config, flag
    ):
        found = self.results[(*self.command(config), flag)]
        self.assertEqual(found.returncode, 0, found.stderr)

    def test_an_unknown_flag_is_refused(self):
        command = (*self.command(CONFIGS[0]), "--no_such", self.FLAGS[1])
        found = self.results[command]
        self.assertNotEqual(found.returncode, 0)
        self.assertIn("no_such", found.stdout + found.stderr)


if __name__ == "__main__":
    absltest.main()
