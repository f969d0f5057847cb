"""How Sphinx makes a site of README.md, docs/ and the notebooks (`make docs`). Knows the order of the pages alone.

The pages stay as GitHub shows them: the navigation, the diagrams and the notebooks' outputs are added on the way.
"""

import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import mmdr
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_signature

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

# In the order of a reader's questions. A page that is missing here is a warning, and so fails the build.
NAVIGATION = {
    "Try it": [
        "docs/start",
        "docs/install",
        "docs/supported",
        "docs/model-cards",
        "docs/playground",
        "docs/neuronpedia",
        "notebooks/golden_gate",
        "notebooks/transcoder",
    ],
    "Say what to edit and read": [
        "docs/requests",
        "docs/reads-and-rules",
        "notebooks/reading",
        "docs/names-and-modules",
        "docs/api",
    ],
    "Find features, and prove them": ["docs/labels", "docs/proof", "notebooks/find_and_prove", "docs/reading-files"],
    "Run a server": [
        "docs/serving",
        "docs/operating",
        "notebooks/team",
        "docs/consumers",
        "docs/clients",
        "docs/bridges",
        "docs/performance",
        "docs/versions",
    ],
    "Compare and understand": ["docs/coming-from", "docs/how-it-works", "DECISIONS", "bench/LOG"],
    "Work on it": ["CONTRIBUTING", "CHANGELOG", "SECURITY", "AGENTS", "bench/results/gpu_tests"],
}

project = "saesteer"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*.rst", "notebooks/*.ipynb", "bench/LOG.md", "bench/results/*.md"]
exclude_patterns = [".*", "build", "saesteer", "kernels", "loaders", "tests", "tools"]  # not worth a look
source_suffix = {".md": "markdown", ".ipynb": "markdown", ".rst": "restructuredtext"}
highlight_language = "text"  # blocks without a language are commands and what they print
myst_heading_anchors = 5  # links lead to headings as on GitHub

autodoc_mock_imports = ["vllm"]  # its classes are not described, and importing it takes longer than the build
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
maximum_signature_line_length = 100

html_theme = "furo"
html_title = "saesteer"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False


def _add(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the navigation to the first page, make Markdown of notebooks, and leave each page one title."""
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            entries = "\n".join(f"/{one}" for one in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
    elif page.startswith("notebooks/"):
        source[0] = "\n".join(map(_cell, json.loads(source[0])["cells"]))
    elif page in ("DECISIONS", "bench/LOG"):  # their parts are titles, of which the navigation would list each
        first, mark, parts = source[0].partition("\n# ")
        source[0] = first + re.sub(r"^#", "##", mark + parts, flags=re.MULTILINE)


def _cell(cell: dict[str, Any]) -> str:
    """A notebook's cell with its stored outputs, as Markdown."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text + "\n"
    parts = [f"````python\n{text}\n````\n"]
    for output in cell["outputs"]:
        data = {kind: "".join(held) for kind, held in output.get("data", {}).items()}
        if png := data.get("image/png"):
            parts.append(f'<img src="data:image/png;base64,{png.strip()}" alt="plot">\n')
        elif html := data.get("text/html"):
            parts.append(f"````{{raw}} html\n{html}\n````\n")
        else:
            printed = "".join(output.get("text", data.get("text/plain", "")))
            parts.append(f"````{{code-block}} text\n:class: output\n\n{printed}\n````\n")
    return "\n".join(parts)


def _draw(app: Sphinx, tree: nodes.document) -> None:
    """Put a drawing in the place of each Mermaid diagram, which GitHub draws in the browser; always downwards."""
    for block in list(tree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            text = block.astext().replace("flowchart LR", "flowchart TD")  # the page is narrow
            svg = mmdr.render(text, backend="mermaid-rs-renderer").svg()
            svg = svg.replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)
            block.replace_self(nodes.raw("", svg, format="html"))


class _Source(ModuleAnalyzer):
    """A module's source in which the comment behind a field is marked as its description, as Sphinx wants it."""

    def __init__(self, source: str, *names: Any) -> None:
        super().__init__(re.sub(r"^( +\w+: [^#\n]*  #) ", r"\1: ", source, flags=re.MULTILINE), *names)


def _sign(app: Sphinx, what: str, name: str, one: Any, *_: object) -> tuple[str, None] | None:
    """The signature of a class whose base is not imported, which hides it."""
    if what != "class" or not getattr(one.__mro__[1], "__sphinx_mock__", False):
        return None
    return stringify_signature(inspect.signature(one.__init__.__get__(one)), unqualified_typehints=True), None


def _finish(app: Sphinx, error: Exception | None) -> None:
    """The first page is also index.html."""
    if error is None:
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    ModuleAnalyzer.for_module = _Source.for_module  # type: ignore[method-assign]
    app.connect("source-read", _add)
    app.connect("doctree-read", _draw)
    app.connect("autodoc-process-signature", _sign)
    app.connect("build-finished", _finish)
