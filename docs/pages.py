"""Pages of the site that are not in this folder, for `mkdocs build`.

README is its first page. Each public name has a page with its docstring. The
README of a benchmark, CONTRIBUTING and CHANGELOG are pages as they are. Links
between all of these work on the site as they do in a clone.
"""

import ast
import glob
import os
import posixpath
import re

from mkdocs.structure.files import File

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_COPIED = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    **{
        path: path
        for path in glob.glob("benchmarks/*/README.md", root_dir=_ROOT)
    },
}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files, config):
    """Adds the pages, and those of public names to the navigation."""
    for path, name in _COPIED.items():
        with open(os.path.join(_ROOT, path), encoding="utf-8") as file:
            files.append(File.generated(config, name, content=file.read()))
    names = _public_names("tfscale")
    for name in names:
        text = f"::: {name}\n"
        files.append(File.generated(config, f"api/{name}.md", content=text))
    for section in config.nav:
        if "API" in section:
            section["API"] = [{name: f"api/{name}.md"} for name in names]
    return files


def on_page_markdown(markdown, page, config, files):
    """Makes links of a clone's files those of the site's pages."""
    name = page.file.src_uri
    origin = {page: path for path, page in _COPIED.items()}
    folder = posixpath.dirname(origin.get(name, f"docs/{name}"))

    def link(match):
        text, target, anchor = match.groups()
        if not target or "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        path = _COPIED.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(path) is None:
            return text  # only in the clone: an example, a folder
        path = posixpath.relpath(path, posixpath.dirname(name) or ".")
        return f"[{text}]({path}{anchor or ''})"

    return _LINK.sub(link, markdown)


def _public_names(package):
    """`package.name` of all in `__all__`, and of the public packages in it."""
    folder = os.path.join(_ROOT, *package.split("."))
    with open(os.path.join(folder, "__init__.py"), encoding="utf-8") as file:
        body = ast.parse(file.read()).body
    (names,) = (
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    found = []
    for name in names:
        if name.startswith("__"):
            continue
        path = f"{package}.{name}"
        inside = os.path.join(folder, name, "__init__.py")
        if os.path.exists(inside):
            found += _public_names(path)
        else:
            found.append(path)
    return found
