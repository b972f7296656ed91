"""What is private in Keras and TensorFlow is reached through one door."""

import ast
import functools
import importlib
import importlib.util
import inspect
import re

import keras
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import source_files
from tests._internals import check_test
from tfscale._internals import check
from tfscale._internals import in_place

DOOR = "tfscale/_internals/"
_BY_NAME = ("delattr", "getattr", "hasattr", "setattr")
_OF_OBJECT = ("__delattr__", "__getattribute__", "__setattr__")
# They reach all attributes of an object at once, or hide which one it is.
_OF_ALL = (
    *("__delattr__", "__dict__", "__getattr__", "__getattribute__"),
    *("__getstate__", "__setattr__"),
)
_INDIRECT = (
    *("__import__", "attrgetter", "dir", "eval", "exec", "getattr_static"),
    *("getmembers", "import_module", "methodcaller", "vars"),
)
# Objects that are made in the module, and `object`, by which a frozen one is.
_OURS = ("object", "self", "_thread")
_SUPER = re.compile(r"super\((\w+, self)?\)")
_PRIVATE_MODULE = re.compile(r"^(keras|keras_hub)\.src\b|^tensorflow\.python\b")
_PRIVATE_PARTS = ("__internal__", "python", "src")  # of Keras and TensorFlow
_PRIVATE_FIELD = re.compile(r"\{\w*\._[a-z]")  # of `str.format`
# Public, but for the name: of every `NamedTuple`, of `os`, and an argument of
# `tf.profiler.experimental.Trace`.
PUBLIC = {"_asdict", "_exit", "_fields", "_r", "_replace"}


ALL_NAMES = {name for *_, name in check_test.ROWS}


def package_files():
    return [
        path
        for path in source_files.python_files()
        if path.startswith("tfscale/") and not path.startswith(DOOR)
    ]


def is_private(name):
    return name.startswith("_") and not name.endswith("__") and name != "_"


def reads_by_name(call):
    """Whether it is a call of `getattr` and its like."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    return len(call.args) > 1 and (
        (owner in ("", "builtins") and name in _BY_NAME)
        or (owner == "object" and name in _OF_OBJECT)
    )


def attribute_named(call):
    """What such a call names, as far as it is known."""
    name = call.args[1]
    if isinstance(name, ast.JoinedStr):
        return f"{ast.unparse(name)[2:-1]}"
    if isinstance(name, ast.BinOp):
        return f"_{ast.unparse(name)}"  # what it comes to is not known
    return name.value if isinstance(name, ast.Constant) else ""


def foreign_attributes(tree):
    """`line: expression` of each private attribute of another object.

    Not of those that a class of the same module sets, but for such as have the
    name of one of Keras or TensorFlow.
    """
    own = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for name in own_attributes(node)[0]
    } - ALL_NAMES
    called = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            is_own = of in ("self", "cls") or _SUPER.fullmatch(of)
            if node.attr in _OF_ALL and not is_own and of not in _OURS:
                yield f"{node.lineno}: {ast.unparse(node)}"
            allowed = is_own or node.attr in PUBLIC | own
            is_refused = is_private(node.attr) and not allowed
            if is_refused or node.attr in _INDIRECT:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Name) and (
            node.id in _INDIRECT
            or (node.id in _BY_NAME and node not in called)
            or (node.id in ("cls", "self") and isinstance(node.ctx, ast.Store))
        ):
            yield f"{node.lineno}: {node.id}"
        elif isinstance(node, ast.Call) and reads_by_name(node):
            name = attribute_named(node)
            if is_private(name) or name in _PRIVATE_PARTS:
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.keyword):
            if node.arg and is_private(node.arg) and node.arg not in PUBLIC:
                yield f"{node.value.lineno}: {node.arg}="
        elif isinstance(node, ast.MatchClass):
            for name in filter(is_private, node.kwd_attrs):
                yield f"{node.lineno}: {name}"
    yield from hidden_names(tree)


def hidden_names(tree):
    """Strings that are private names, or paths of private modules."""
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and (
            _PRIVATE_MODULE.search(text)
            or _PRIVATE_FIELD.search(text)
            or (id(node) not in parts and re.fullmatch(r"_[a-z]\w*", text))
        ):
            yield f"{node.lineno}: {text!r}"


@functools.cache
def names_of(kind):
    """Names in the table of a class and of those that it inherits from."""
    names = set()
    for _, owner, name in check_test.ROWS:
        if "/" in owner:
            continue
        found = check.resolve(owner)
        if not inspect.isclass(found):
            # An attribute that a method sets.
            found = check.resolve(owner.rpartition(".")[0])
        if inspect.isclass(found) and issubclass(kind, found):
            names.add(name)
    return names


@functools.cache
def classes():
    """`(place, class, tree)` of each class of tfscale."""
    found = []
    for path in package_files():
        module = importlib.import_module(
            path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        )
        found += [
            (f"{path}:{node.lineno}", getattr(module, node.name), node)
            for node in source_files.parse(path).body
            if isinstance(node, ast.ClassDef)
        ]
    return found


def is_mixin(kind):
    """Whether it is put in the place of a class that it does not name."""
    return issubclass(kind, in_place.Mixin)


def foreign_bases(kind):
    return [
        base
        for base in kind.__mro__
        if base.__module__.split(".")[0] in ("keras", "tensorflow")
    ]


def own_attributes(node):
    """(attributes that a class sets or defines, those that it reads)."""
    made = {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
    made |= {
        target.id
        for n in ast.walk(node)
        for target in (
            n.targets
            if isinstance(n, ast.Assign)
            else [n.target]
            if isinstance(n, ast.AnnAssign)
            else []
        )
        if isinstance(target, ast.Name)
    }
    read = set()
    for n in ast.walk(node):
        if isinstance(n, ast.Attribute) and is_private(n.attr):
            of = ast.unparse(n.value)
            if of == "self" and not isinstance(n.ctx, ast.Load):
                made.add(n.attr)
            elif of in ("self", "cls") or of.startswith("super("):
                read.add(n.attr)
    return made, read


class DoorTest(parameterized.TestCase):
    def test_no_private_attribute_of_another_object_elsewhere(self):
        for path in package_files():
            with self.subTest(path):
                tree = source_files.parse(path)
                self.assertEqual(list(foreign_attributes(tree)), [])

    @parameterized.parameters(
        "layer._losses",
        "model.layers[0]._losses",
        "keras.Model._losses",
        "getattr(layer, '_losses')",
        "hasattr(layer, f'_{name}')",
        "setattr(layer, '_losses', [])",
        "layer._losses = []",
        "layer.__dict__['_losses']",
        "vars(layer)['_losses']",
        "operator.attrgetter('_losses')(layer)",
        "inspect.getattr_static(layer, name)",
        "layer.__getattribute__(name)",
        "importlib.import_module(name)",
        "sys.modules['keras.src.layers']",
        "f'keras_hub.src.models.{name}'",
        "NAMES = ['_losses']",
        "getattr(keras, 'src').layers",
        "getattr(layer, '_' + name)",
        "builtins.getattr(layer, '_losses')",
        "read = getattr",
        "map(getattr, layers, names)",
        "object.__setattr__(layer, '_losses', [])",
        "layer.__getstate__()",
        "super(Layer, layer)._losses",
        "operator.methodcaller('_losses')(layer)",
        "eval('layer._losses')",
        "'{0._losses}'.format(layer)",
        "instances.view(layer, _losses=[])",
        "match layer:\n  case keras.Layer(_losses=x): pass",
        "self = layer",
        # A class of the module has an attribute of that name too.
        "class A:\n  def f(self): self._losses = layer._losses",
    )
    def test_such_an_attribute_is_seen(self, code):
        self.assertNotEmpty(list(foreign_attributes(ast.parse(code))))

    def test_what_the_door_itself_uses_is_in_the_tables(self):
        own = ("symbols.py", "check.py")
        for path in source_files.python_files():
            if not path.startswith(DOOR):
                continue
            tree = source_files.parse(path)
            names = {
                name.rpartition(".")[2]
                for name in source_files.imported_names(path)
                if name.startswith(("keras.src.", "tensorflow.python."))
                and not self.is_module(name)
            }
            if not path.endswith(own):
                names |= {
                    node.attr
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Attribute)
                    and is_private(node.attr)
                    and ast.unparse(node.value) not in ("self", "super()")
                    and ast.unparse(node.value) != "sys"
                }
            with self.subTest(path):
                self.assertEqual(names - ALL_NAMES, set())

    def test_what_is_used_of_private_modules_is_in_the_tables(self):
        # Such as `symbols.record.stop_recording`, without an underscore.
        for path in source_files.python_files():
            if path.startswith("tfscale/"):
                names = {
                    node.attr
                    for node in ast.walk(source_files.parse(path))
                    if isinstance(node, ast.Attribute)
                    and ast.unparse(node.value).startswith("symbols.")
                }
                with self.subTest(path):
                    self.assertEqual(names - ALL_NAMES, set())

    def is_module(self, name):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    def test_no_name_of_the_tables_is_a_string_elsewhere(self):
        names = {name for *_, name in check_test.ROWS if is_private(name)}
        for path in package_files():
            for node in ast.walk(source_files.parse(path)):
                if isinstance(node, ast.Constant):
                    self.assertNotIn(node.value, names, f"{path}:{node.lineno}")

    def test_what_a_class_overrides_is_in_the_table(self):
        for place, kind, _ in classes():
            for name in filter(is_private, vars(kind)):
                if name != "_abc_impl" and any(
                    name in vars(base) for base in foreign_bases(kind)
                ):
                    with self.subTest(f"{place}: {kind.__name__}.{name}"):
                        self.assertIn(name, names_of(kind))

    def test_what_a_class_has_from_a_foreign_one_is_in_the_table(self):
        attributes = {kind: own_attributes(n) for _, kind, n in classes()}
        for place, kind, _ in classes():
            made = set().union(
                *(attributes[b][0] for b in kind.__mro__ if b in attributes)
            )
            # A base may read what those have that are made of it.
            names = ALL_NAMES if is_mixin(kind) else set()
            for other in attributes:
                if issubclass(other, kind):
                    made |= attributes[other][0]
                    names |= names_of(other)
            for name in attributes[kind][1] - made:
                with self.subTest(f"{place}: {kind.__name__}.{name}"):
                    self.assertIn(name, names)

    def test_what_a_mixin_calls_of_the_class_it_is_put_before_is_too(self):
        for place, kind, node in classes():
            if not is_mixin(kind):
                continue
            for call in ast.walk(node):
                if (
                    isinstance(call, ast.Attribute)
                    and is_private(call.attr)
                    and ast.unparse(call.value) == "super()"
                ):
                    with self.subTest(f"{place}: {kind.__name__}"):
                        self.assertIn(call.attr, ALL_NAMES)

    def test_classes_are_found(self):
        kinds = [kind for _, kind, _ in classes()]
        for base in (keras.Model, tf.Variable, in_place.Mixin):
            self.assertTrue(any(issubclass(kind, base) for kind in kinds))


if __name__ == "__main__":
    absltest.main()
