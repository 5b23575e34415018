"""The documentation as a site: `make docs` builds it into build/site, offline, and a warning is an error.

The source folder is the repository itself, so a link has the same meaning in the site and in the files. Pages are the
Markdown files. The contents are the links of docs/index.md and of the other index pages. The reference of the Python
interface is generated from docstrings.

Sphinx, because it generates references from docstrings and because Python itself keeps it. The theme is
pydata-sphinx-theme, because NumPy, SciPy and pandas keep it, and because versions, a dark mode and a search with the
keyboard are parts of it.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

import procgroup

ROOT = Path(__file__).resolve().parents[2]

project = "procgroup"
author = "The procgroup developers"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx reads this name
version = release = procgroup.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    *("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"),
    *("benchmarks/README.md", "news/README.md"),
]
exclude_patterns = ["docs/site"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_llms_txt"]

myst_heading_anchors = 4
suppress_warnings = ["myst.xref_missing.download"]

autodoc_typehints = "signature"
autodoc_mock_imports = [] if find_spec("torch") else ["torch"]

# Prompts and outputs are not copied.
copybutton_prompt_text = "$ "

llms_txt_summary = "Process groups, collectives, stores and launchers for NumPy, PyTorch, JAX and CuPy."

html_context = {"default_mode": "auto"}
html_theme = "pydata_sphinx_theme"
html_title = f"procgroup {version}"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_extra_path = ["_root"]
html_css_files = ["site.css"]
html_show_sourcelink = False
templates_path = ["_templates"]
html_sidebars = {"**": ["contents.html"]}
html_theme_options = {
    "logo": {"text": "procgroup", "image_light": "_static/logo.svg", "image_dark": "_static/logo.svg"},
    "navbar_center": [],
    "navbar_end": ["version-switcher", "theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "switcher": {"json_url": "_static/versions.json", "version_match": version},
    "check_switcher": False,
    "footer_start": ["copyright"],
    "footer_end": [],
}

# The address of the public repository. Links to its files lead there; without one their names are shown.
REPOSITORY = ""

LINK = re.compile(r"\[([^]]+)\]\(([^)#]+\.(?:md|rst))\)")


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Make the lists of links of an index page the site's contents: each heading above a list is a caption."""
    if PurePosixPath(name).name != "index":
        return
    captions: dict[str, list[str]] = {}
    heading = ""
    for line in source[0].splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith(("- ", "|")):
            captions.setdefault(heading, []).extend(target for _, target in LINK.findall(line))
    own = (lambda target: True) if name == root_doc else (lambda target: "/" not in target)
    for caption, targets in captions.items():
        if targets := [target for target in dict.fromkeys(targets) if own(target)]:
            options = f":hidden:\n:caption: {caption}" if name == root_doc else ":hidden:"
            lines = "\n".join(PurePosixPath(target).with_suffix("").as_posix() for target in targets)
            source[0] += f"\n```{{toctree}}\n{options}\n\n{lines}\n```\n"


class Public(SphinxDirective):
    """``.. public:: MODULE`` documents the public names of a module, by the names that users write."""

    required_arguments = 1
    documented: ClassVar[set[str]] = set()

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        if module.startswith("procgroup."):
            package, names = module, import_module(module).__all__
        else:
            package, names = "procgroup", procgroup._NAMES_OF_MODULES[module].split()
        self.documented.add(module)
        lines: list[str] = []
        for name in names:
            if name[0] != "_":
                lines += lines_of(f"{package}.{name}", getattr(import_module(package), name))
        return self.parse_text_to_nodes("\n".join(lines))


def lines_of(name: str, value: object) -> list[str]:
    """The directive that documents a public name."""
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        return [f".. auto{kind}:: {name}", "   :members:", ""]
    if not inspect.isroutine(value):
        return [f".. autodata:: {name}", ""]
    # Given here, because autodoc would repeat it for each overload on async_op.
    signature = stringify_signature(inspect.signature(value), unqualified_typehints=True)
    return [f".. autofunction:: {name}{signature}", ""]


def require_all_public_names(app: Sphinx, environment: object) -> None:
    if missing := set(procgroup._NAMES_OF_MODULES) - Public.documented:
        raise SphinxError(f"No page of docs/reference has the public names of {', '.join(sorted(missing))}.")


def show_files_as_text(app: Sphinx, tree: nodes.document) -> None:
    """A link to a file that is not a page, such as a test, becomes its name, or a link to the repository."""
    for node in list(tree.findall(addnodes.download_reference)):
        if REPOSITORY:
            node.replace_self(nodes.reference("", "", *node.children, refuri=f"{REPOSITORY}/{node['reftarget']}"))
        else:
            node.replace_self(nodes.inline("", "", *node.children))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public", Public)
    app.connect("source-read", add_contents)
    app.connect("doctree-read", show_files_as_text)
    app.connect("env-check-consistency", require_all_public_names)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
