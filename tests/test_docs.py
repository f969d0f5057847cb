"""The pages keep their word: tables are as the code has them, links and file names lead somewhere, specs are right."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest

from saesteer.errors import SpecError
from saesteer.language.edits import OPS, Clamp, Gate, Scope
from saesteer.language.fields import table
from saesteer.language.inline import InlineVector
from saesteer.language.rules import RULES, Watched
from saesteer.language.spec import ActivationRead, FeatureRead, HiddenRead, ProbeRead, Return, Spec, from_json
from saesteer.planning.messages import resolve
from saesteer.planning.plan import END, Catalog, Plan
from saesteer.planning.planner import plan
from saesteer.planning.windows import windows
from tests.markdown import blocks
from tests.spec.catalogs import Info, Set
from tests.spec.chats import ENDS, ROLES
from tools import tables

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS, ROOT / "bench/LOG.md"]
PAGES += [ROOT / name for name in ("AGENTS.md", "DECISIONS.md", "CONTRIBUTING.md", "CHANGELOG.md")]
READS = (ROOT / "docs/reads-and-rules.md").read_text()
REQUESTS = (ROOT / "docs/requests.md").read_text() + READS
START = (ROOT / "docs/start.md").read_text()

PROMPT = 34
# What docs/requests.md says that its server has.
CATALOG = Catalog(
    {"demo": Info("resid_post.15", features=9216), "gs20": Info("resid_post.20", features=16384, has_max_act=False)}
    | {f"scope@{layer}": Info(f"resid_post.{layer}", features=16384) for layer in (9, 17, 22)}
    | {f"clt@{layer}": Info(f"mlp_out.{layer}", f"mlp_in.{layer}", targets=8 - layer) for layer in range(8)},
    None,
    64,
    {name: Set() for name in ("happy", "assistant", "refusal", "sentiment")}
    | {"layered": Set((12, 13, 14)), "risk": Set((20,))},
    {"golden-gate": from_json({"edits": [{"op": "clamp", "dictionary": "gs20", "feature": 34, "value": 8.0}]})},
    width=4,
    parts=True,
    inline_rows=1,
    sets={"scope": (9, 17, 22), "clt": tuple(range(8))},
    addresses={"np:gemma-2-2b/20-gemmascope-res-16k": "gs20"},
)


def planned(spec: Spec) -> Plan:
    def spans(runs: Any, at: str) -> list[tuple[int, int]]:
        return [([0, *ENDS][first], ENDS[end - 1]) for first, end in runs]

    return plan(resolve(spec, CATALOG, PROMPT, ROLES, spans), CATALOG, PROMPT)


def specs(page: str) -> Iterator[dict[str, Any]]:
    """Those of the page's JSON blocks that are a spec or an edit, as specs."""
    for block in blocks(page, "json"):
        value = json.loads(block if block.startswith("{") else f"{{{block}}}")
        if "op" in value and "applied" not in value and "tokens_edited" not in value:
            yield {"edits": [value]}
        elif "edits" in value or "return" in value:
            yield value


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        file, _, heading = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if heading:
            assert heading in map(anchor, re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)), link


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_every_page_is_reached_from_the_readme() -> None:
    linked = re.findall(r"\]\((docs/[^)#]+)", (ROOT / "README.md").read_text())
    assert {path.relative_to(ROOT).as_posix() for path in DOCS} <= set(linked)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_named_files_are_there(page: Path) -> None:
    named = re.findall(r"`((?:saesteer|kernels|loaders|tests|tools|bench)/[\w/.]+\.\w+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda path: path.stem)
def test_tables_are_as_the_code_has_them(page: Path) -> None:
    text = page.read_text()
    assert text == tables.filled(text), "run `make tables`"


def test_the_command_that_writes_them_starts() -> None:
    """It is run from the repository's folder, where `tests` and `tools` are packages that nobody has installed."""
    rule = re.search(r"^tables:.*\n\t\$\(BIN\)/python (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule is not None
    words = rule[1].split()
    code = "import sys, runpy; sys.path[0] = ''; runpy.run_module(sys.argv[1])"  # as python -m does, but for __main__
    assert words[0] == "-m"
    done = subprocess.run([sys.executable, "-c", code, words[1]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_table_is_on_a_page() -> None:
    shown = [name for page in tables.PAGES for _, name, _ in tables.MARKED.findall(page.read_text())]
    assert sorted(shown) == sorted(tables.TABLES)


def test_every_example_of_a_request_is_right() -> None:
    found = [*specs(REQUESTS), *specs(START)]
    for wire in found:
        spec = from_json(wire)
        done = planned(spec)
        ops = {edit["op"] for edit in wire.get("edits", ())}
        assert bool(done.groups) == bool(ops & OPS.keys())
        assert bool(done.rules) == bool(ops & RULES.keys())
        assert bool(done.measures) == bool(done.rules)
        assert bool(done.readouts) == ("return" in wire and wire["return"] != {"dose": True})
    edits = [edit for wire in found for edit in wire.get("edits", ())]
    assert {edit["op"] for edit in edits} == OPS.keys() | RULES.keys()


@pytest.mark.parametrize("op", OPS)
def test_every_field_of_an_edit_is_described(op: str) -> None:
    [section] = re.findall(rf"^### {op}\n(.*?)^##", REQUESTS, re.DOTALL | re.MULTILINE)
    rows = " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))
    names = {one.name for one in fields(OPS[op])} - {"when", "scope"}
    assert {name for name in names if f"`{name}`" not in rows} == set()


def test_every_field_of_a_rule_is_described() -> None:
    [section] = re.findall(r"^## Rules\n(.*)", READS, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    own = {one.name for one in fields(Watched)} - {one.name for one in fields(Gate)}
    assert all({one.metadata["key"] or one.name for one in fields(rule)} | own == set(rows) for rule in RULES.values())


KINDS = [FeatureRead, ProbeRead, ActivationRead, HiddenRead]


@pytest.mark.parametrize("record", [Spec, Return, *KINDS, Scope, Gate, InlineVector], ids=lambda one: str(one.__name__))
def test_every_field_of_a_record_is_described(record: Any) -> None:
    known = table(record)
    assert {name for name in known if not re.search(rf'[`"]{name}[`"]', REQUESTS)} == set()


def test_scopes_hold_what_their_table_says() -> None:
    rows = re.findall(r"^\| `(\{.*?\})` \| `(\[\[.*?\]\])` \|", REQUESTS, re.MULTILINE)
    assert len(rows) == 9
    for scope, expected in rows:
        spec = from_json(
            {"edits": [{"op": "clamp", "dictionary": "demo", "feature": 1, "value": 1, "scope": json.loads(scope)}]}
        )
        found = windows(cast(Clamp, spec.edits[0]).scope, 10)
        assert [[start, None if end == END else end] for start, end in found] == json.loads(expected), scope


def test_the_refusal_is_what_it_says() -> None:
    [refused], [error] = (blocks(REQUESTS, f"json {kind}") for kind in ("refused", "error"))
    with pytest.raises(SpecError) as caught:
        planned(from_json(refused))
    told = json.loads(error)["error"]
    assert (told["message"], told["param"]) == (f"{caught.value} [{caught.value.code}]", caught.value.field)
