import contextlib
import glob
import importlib.util
import io
import os
import re
import unittest
from unittest import mock

import keras
import pytest
import tensorflow as tf
from absl.testing import absltest
from absl.testing import parameterized

from tests import forked_python
from tests import source_files
from tests.source_files import REPOSITORY
from tfscale.mesh import timing

PAGES = sorted(
    f"docs/{name}"
    for name in os.listdir(os.path.join(REPOSITORY, "docs"))
    if name.endswith(".md")
)

# They train what other pages do one by one, on several meshes.
COMBINING = ("docs/planner.md", "docs/pretrained.md", "docs/tutorial.md")

BENCHMARKS = [
    os.path.relpath(path, REPOSITORY)
    for path in sorted(
        glob.glob(os.path.join(REPOSITORY, "benchmarks", "*", "README.md"))
    )
]


def _read(name):
    with open(os.path.join(REPOSITORY, name), encoding="utf-8") as file:
        return file.read()


def _programs(name):
    return re.findall(r"^```python\n(.*?)^```", _read(name), re.M | re.S)


# A smaller model: to trace it takes the most time.
_SMALLER = {
    "docs/optimizers.md": ("range(4)", "range(1)"),
    "docs/pipelines.md": ("in range(6)", "in range(2)"),
    "docs/tutorial.md": ("range(2)", "range(1)"),
}


def _run_alone(program, folder):
    """Runs it as it stands, on one device: that of a laptop."""
    forked_python.output(["-c", program], folder, timeout=200)


_IS_PLAIN_MODEL = """
import numpy as np

loaded = keras.models.load_model("model.keras")
assert type(loaded) is keras.Sequential
x = np.arange(32 * 64).reshape(32, 64) % 256
np.testing.assert_allclose(
    loaded.predict_on_batch(x), model.predict(x, verbose=0), 1e-5, 1e-5
)
"""


class ReadmeTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 4)
    @pytest.mark.crossing(every=2)
    def test_the_quick_start_runs_and_saves_a_plain_model(self, num_layers):
        program, _ = _programs("README.md")
        for long, short in (
            ("steps_per_epoch=100", "steps_per_epoch=3"),
            ("range(4)", f"range({num_layers})"),
        ):
            self.assertIn(long, program)
            program = program.replace(long, short)
        _run_alone(program + _IS_PLAIN_MODEL, self.create_tempdir().full_path)

    def test_the_proof_of_a_model_runs(self):
        _, program = _programs("README.md")
        _run_alone(program, self.create_tempdir().full_path)

    def test_continuous_integration_runs_what_the_readme_says(self):
        ((extra, options),) = re.findall(
            r'pip install -e "\.\[(\w+)\]" && .*/pytest\b(.*)',
            _read("README.md"),
        )
        script = _read(".ci/run")
        self.assertIn(f'pip" install --quiet -e ".[{extra},docs]"', script)
        self.assertIn(f'pytest"{options}', script)


class PagesTest(parameterized.TestCase):
    # That of the input needs files: input_page_test.py.
    @parameterized.parameters(
        *(
            page
            for page in PAGES
            if page not in ("docs/input.md", "docs/search.md", *COMBINING)
        )
    )
    @pytest.mark.crossing(every=11)
    def test_the_programs_of_a_page_run_one_after_the_other(self, page):
        self._run(page)

    @parameterized.parameters(*COMBINING)
    @pytest.mark.crossing
    def test_the_programs_of_a_page_that_combines_others(self, page):
        self._run(page)

    @parameterized.parameters(*_SMALLER)
    @pytest.mark.crossing
    def test_the_programs_of_a_page_as_they_are(self, page):
        self._run(page, is_smaller=False)

    @unittest.skipUnless(
        importlib.util.find_spec("keras_tuner"), "needs KerasTuner"
    )
    @pytest.mark.crossing
    def test_the_programs_of_the_page_about_search(self):
        self._run("docs/search.md")

    def _run(self, page, is_smaller=True):
        keras.utils.set_random_seed(0)
        programs = _programs(page)
        # Programs of several processes are defined only.
        guarded = [p for p in programs if '"__main__"' in p]
        if any("device_mesh(" in p for p in programs if p not in guarded):
            for program in guarded:
                exec(program, {"__name__": "page"})
            programs = [p for p in programs if p not in guarded]
            folder = self.create_tempdir().full_path
            program = "\n".join(programs)
            if is_smaller and page in _SMALLER:
                self.assertIn(_SMALLER[page][0], program)
                program = program.replace(*_SMALLER[page])
            _run_alone(program, folder)
            return
        here = os.getcwd()
        os.chdir(self.create_tempdir().full_path)
        self.addCleanup(os.chdir, here)
        names = {"__name__": "page"}
        with (
            contextlib.redirect_stdout(io.StringIO()),
            # Some seconds less.
            mock.patch.dict(timing.WIDTHS, CPU=128),
            mock.patch.object(timing, "SECONDS", 0.0),
        ):
            for program in programs:
                exec(program, names)

    @parameterized.parameters("README.md", *PAGES, *BENCHMARKS)
    def test_the_commands_of_a_page_name_what_is_there(self, page):
        text = _read(page).replace("\\\n", "")
        sources = "".join(
            _read(path)
            for path in source_files.python_files()
            if path.startswith(("benchmarks/", "examples/", "tfscale/launch/"))
        )
        for command in re.findall(r"python -m .*", text):
            for module in re.findall(r" -m ([\w.]+)", command):
                self.assertIsNotNone(importlib.util.find_spec(module), module)
            for path in re.findall(r" --flagfile=([\w./]+)", command):
                self.assertTrue(os.path.exists(os.path.join(REPOSITORY, path)))
            flags = re.findall(r" --(\w+)", command)
            for flag in {*flags} - {"flagfile"}:
                self.assertIn(f'"{flag}"', sources, command)

    @parameterized.parameters("README.md", *PAGES)
    def test_the_pages_that_it_links_are_there(self, page):
        folder = os.path.dirname(os.path.join(REPOSITORY, page))
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", _read(page)):
            self.assertTrue(os.path.exists(os.path.join(folder, link)), link)


if __name__ == "__main__":
    absltest.main()
