"""Each name of the tables has a contract: what it is relied on to do."""

import glob
import importlib
import os

from absl.testing import absltest

from tests import source_files
from tests._internals import check_test


def contracts():
    """`(owner, name)` that tests say they hold a contract of."""
    folder = os.path.join(source_files.REPOSITORY, "tests", "_internals")
    for path in glob.glob(os.path.join(folder, "*_contracts_test.py")):
        name = os.path.basename(path).removesuffix(".py")
        module = importlib.import_module(f"tests._internals.{name}")
        for kind in vars(module).values():
            for test in vars(kind).values() if isinstance(kind, type) else ():
                yield from getattr(test, "contracts", ())


def is_of(owner, end):
    return owner == end or owner.endswith((f".{end}", f"/{end}"))


class ContractsTest(absltest.TestCase):
    def test_each_name_has_one(self):
        held = list(contracts())
        for _, owner, name in check_test.ROWS:
            with self.subTest(f"{owner}: {name}"):
                self.assertTrue(
                    any(name == n and is_of(owner, end) for end, n in held)
                )

    def test_each_is_of_a_name(self):
        for end, name in contracts():
            with self.subTest(f"{end}: {name}"):
                self.assertTrue(
                    any(
                        name == n and is_of(owner, end)
                        for _, owner, n in check_test.ROWS
                    )
                )


if __name__ == "__main__":
    absltest.main()
