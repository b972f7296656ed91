"""Every name of the tables is there, and is missed if it is not."""

import json

import keras
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests.source_files import REPOSITORY
from tfscale._internals import check

ROWS = [row[:3] for row in check.ROWS]


def names_in(owner):
    """The names of an owner, given by the end of what it is called."""
    return [name for _, of, name in ROWS if of.endswith(owner)]


# Each name by turns is another one, while what relies on it is checked.
_RENAMED = """
import contextlib, functools, importlib, inspect, json, pathlib, re, sys, types
import importlib.metadata
import keras, tensorflow

# It reads what is installed, which takes longer than an import.
importlib.metadata.packages_distributions = functools.cache(
    importlib.metadata.packages_distributions
)

def resolve(owner):
    parts = owner.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        found = functools.reduce(getattr, parts[end:], module)
        if isinstance(found, property):
            found = found.fget
        return inspect.unwrap(found) if callable(found) else found

def rename_in_code(function, name):
    def other(n):
        if isinstance(n, types.CodeType) and n.co_name == name:
            return n.replace(co_name="renamed")
        return "renamed" if n == name else n

    def others(names):
        return tuple(map(other, names))

    code = function.__code__
    function.__code__ = code.replace(
        co_names=others(code.co_names), co_consts=others(code.co_consts)
    )

@contextlib.contextmanager
def renamed(owner, name):
    if "/" in owner:
        read = pathlib.Path.read_text
        pathlib.Path.read_text = lambda path, **kwargs: (
            re.sub(rf"\\\\b{name}\\\\b", "renamed", read(path, **kwargs))
            if str(path).endswith(owner) else read(path, **kwargs)
        )
        yield
        pathlib.Path.read_text = read
        return
    found = resolve(owner)
    if isinstance(found, types.FunctionType):
        code = found.__code__
        rename_in_code(found, name)
        yield
        found.__code__ = code
    else:
        value = vars(found)[name]
        setattr(found, "renamed", value)
        delattr(found, name)
        yield
        setattr(found, name, value)
        delattr(found, "renamed")

from tfscale._internals import check

for number, (owner, name) in enumerate(json.load(sys.stdin)):
    said = ""
    with renamed(owner, name):
        try:
            if number:
                check.check()  # as an import does, which takes longer
            for module in list(sys.modules):
                if module.partition(".")[0] == "tfscale":
                    del sys.modules[module]
            import tfscale
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
check.check()  # all have their names again
""".replace("\\\\", "\\")


class CheckTest(parameterized.TestCase):
    def test_a_renamed_name_is_one_error_at_import(self):
        # Names that are overridden here would silently not be called, and
        # training would go on without its clipping, or its averages.
        process = forked_python.run(
            ["-c", _RENAMED],
            REPOSITORY,
            input=json.dumps([(owner, name) for _, owner, name in ROWS]),
        )
        lines = process.stdout.splitlines()
        self.assertLen(lines, len(ROWS), process.stderr)
        self.assertEqual(process.returncode, 0, process.stderr)
        versions = {
            "keras": keras.__version__,
            "tensorflow": tf.__version__.partition("-")[0],
        }
        # That of a nightly has another name.
        names = {
            "keras": "keras(-nightly)?",
            "keras_hub": "keras-hub(-nightly)?",
            "tensorflow": "(tensorflow|tf-nightly|tf_nightly)",
        }
        for (package, owner, name), line in zip(ROWS, lines, strict=True):
            with self.subTest(f"{owner}: {name}"):
                self.assertRegex(
                    json.loads(line),
                    rf"(?s)^ImportError: tfscale relies on .* Received: .*"
                    rf"{names[package]} {versions.get(package, '')}.*"
                    rf"`{owner}` has no `{name}` \(for: .*\)\n"
                    r'Known to work: "keras==\d.*", "tensorflow==\d.*"',
                )

    @parameterized.parameters(
        ("keras.src.no_such_module", "name"),
        ("keras.src.layers.layer.NoSuchClass", "call"),
        ("keras.src.layers.layer.Layer.no_such_method", "name"),
        # `Layer` has one; a subclass that does not define its own has none.
        ("keras.src.layers.core.dense.Dense", "_flatten_layers"),
    )
    def test_what_is_not_there_is_missing(self, owner, name):
        self.assertFalse(check.has(owner, name))

    def test_every_name_says_why(self):
        for _, owner, name, why in check.ROWS:
            self.assertTrue(why, f"{owner}: {name}")


if __name__ == "__main__":
    absltest.main()
