"""The site of the pages: it builds without a warning, its links lead somewhere, and it loads nothing from elsewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest

from saesteer import errors
from saesteer.language import spec

ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """What a page has (``ids``), where it leads (``links``), what it loads, and how many drawings it holds."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.drawings = self.pictures = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loads |= {found[name] for name in ("href", "src") if name in found}
        self.drawings += tag == "svg" and found.get("style", "").startswith("max-width")
        self.pictures += tag == "img"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The pages of a strict build, by their path without a suffix. It takes some ten seconds of processor time."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return {path.relative_to(out).with_suffix("").as_posix(): Page(path) for path in out.rglob("*.html")}


def test_every_page_is_there(site: dict[str, Page]) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    assert {path.relative_to(ROOT).with_suffix("").as_posix() for path in pages} <= site.keys()
    assert {"index", "search", "docs/api", "bench/LOG"} <= site.keys()


def test_links_lead_somewhere(site: dict[str, Page]) -> None:
    known = {page.path.resolve(): page for page in site.values()}
    for page in site.values():
        for link in page.links | page.loads:
            file, _, heading = link.partition("#")
            if re.match(r"(https?|mailto|data):", file):
                continue
            target = (page.path.parent / unquote(file.partition("?")[0])).resolve() if file else page.path.resolve()
            assert target.is_file(), f"{page.path}: {link}"
            if heading and target in known:
                assert unquote(heading) in known[target].ids, f"{page.path}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: dict[str, Page]) -> None:
    assert {one for page in site.values() for one in page.loads if re.match(r"\w+:(?<!data:)|//", one)} == set()


def test_diagrams_and_plots_are_drawn(site: dict[str, Page]) -> None:
    drawn = (ROOT / "docs/how-it-works.md").read_text().count("```mermaid")
    assert site["docs/how-it-works"].drawings == drawn > 0
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        drawn = path.read_text().count('"image/png"')
        assert site[f"notebooks/{path.stem}"].pictures == drawn > 0


def test_every_public_name_is_described(site: dict[str, Page]) -> None:
    public = {name: import_module(name).__all__ for name in ("saesteer", "saesteer.client", "saesteer.consumers")}
    own = (one for one in vars(errors).values() if isinstance(one, type) and one.__module__ == errors.__name__)
    raised = {one.__name__ for one in own}
    names = {f"{home}.{name}" for home, found in public.items() for name in found if name not in raised}
    names |= {f"saesteer.errors.{name}" for name in raised} | {"saesteer.hf.Model.read", "saesteer.spec.Scope"}
    names |= {f"saesteer.spec.{record.__name__}" for record in (*spec.OPS.values(), *spec.RULES.values())}
    assert names - {"saesteer.__version__", "saesteer.Spec"} - site["docs/api"].ids == set()
