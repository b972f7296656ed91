"""The English of docstrings, errors, comments and pages: what is not written.

Each pattern is a turn of phrase that readers stumbled over, or of Britain.
"""

import os
import re

from absl.testing import absltest
from absl.testing import parameterized

from tests import source_files

_STEMS = (
    *("analys", "centr", "initialis", "normalis", "optimis", "organis"),
    *("quantis", "recognis", "regularis", "serialis", "specialis"),
    *("summaris", "synchronis", "utilis", "vectoris"),
)
PATTERNS = {
    "American spelling": r"\b\w*(?:"
    + "|".join(f"{stem}e[ds]?\\b|{stem}ing\\b|{stem}ation" for stem in _STEMS)
    + r"|neighbour|behaviour|colour|favour|labelled|modelled|licence\b|grey\b)",
    "a sentence names a thing, and no clause": (
        r'(?:"""|[\w)`]\. |[^#]# )(?-i:What)\b(?![^.]*\?)'
    ),
    "remove, not leave away": r"\bleave (?:that|this|it|the \w+) away\b",
    "`such as` is followed by a noun": r'\buse such as\b|\bsuch as `?"',
    "say what one thing depends on": r"\bgo(?:es)? by\b",
    "say what something offers": r"\b(?:to be|cannot be) had\b",
    "a custom one": r"\b(?:one|user)'s own\b",
    "name the thing": r"\bbeside (?:it|them)\b",
    "that of has a noun before it": (r'(?:"""|\. |# )(?-i:That|Those) of\b'),
    "a relative clause names its noun": r"\bof which\b",
}


def prose():
    """`(path, text)` of the package and of all pages."""
    paths = [p for p in source_files.python_files() if p.startswith("tfscale/")]
    folder = os.path.join(source_files.REPOSITORY, "docs")
    pages = [name for name in os.listdir(folder) if name.endswith(".md")]
    paths += [os.path.join("docs", name) for name in sorted(pages)]
    for path in [*paths, "README.md", "CHANGELOG.md", "CONTRIBUTING.md"]:
        full_path = os.path.join(source_files.REPOSITORY, path)
        with open(full_path, encoding="utf-8") as file:
            yield path, file.read()


def found(pattern, text):
    """`line: words` for each place where a text has a pattern."""
    # Errors are strings over several lines.
    joined = re.sub(r'"\n\s*f?"', lambda m: " " * len(m[0]), text)
    return [
        f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for match in re.finditer(
            pattern.replace(" ", r"\s+"), joined, re.IGNORECASE
        )
    ]


class ProseTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (rule.replace(" ", "_").replace("`", ""), rule) for rule in PATTERNS
    )
    def test_it_is_written_as_in_the_guides_of_keras(self, rule):
        places = [
            f"{path}:{place}"
            for path, text in prose()
            for place in found(PATTERNS[rule], text)
        ]
        self.assertEqual(places, [], f"{rule}.")

    @parameterized.parameters(
        ("American spelling", "a renormalised value", "a normalized value"),
        ("American spelling", "centred at 0", "in parallel, analysis"),
        ("remove, not leave away", "x=3. Leave that away.", "Leave it out."),
        ("say what one thing depends on", "that goes by", "goes beyond"),
        ("remove, not leave away", '"Leave that "\n  "away"', "left"),
        (
            "a sentence names a thing, and no clause",
            "It runs. What is left waits.",
            "## What it is\n\nIt knows what waits. What is that?",
        ),
        (
            "that of has a noun before it",
            "# That of a lookup is sparse.",
            "The gradient is that of a lookup.",
        ),
        (
            "a relative clause names its noun",
            "two devices, each of which adds",
            "two devices that add",
        ),
        ("`such as` is followed by a noun", 'such as `"a"`', "such as `a`"),
    )
    def test_a_pattern_finds_what_it_names(self, rule, wrong, right):
        self.assertLen(found(PATTERNS[rule], wrong), 1)
        self.assertEmpty(found(PATTERNS[rule], right))


if __name__ == "__main__":
    absltest.main()
