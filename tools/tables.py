"""Writes what comes from the code: the tables of README.md and docs/, and the schemas of schemas.py.

A page's tables stand between pairs of comments, ``<!-- table: NAME -->`` and ``<!-- end -->``. A test compares them.
"""

import ast
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import prometheus_client
import typer
from packaging.version import Version

from saesteer.config import config, settings
from saesteer.dictionaries.coder import CoderInfo
from saesteer.language import edits, fields, inline, returns, sites, spec
from saesteer.loaders import FORMATS, describe
from saesteer.loaders.vectors.contents import READERS
from saesteer.models.families import FAMILIES, SERVED_KINDS, Tap
from saesteer.planning import expand, plan
from saesteer.plugin import contract, unservable
from saesteer.plugin.http.exchange import STATUS
from saesteer.plugin.results import metrics
from saesteer.workbench.cli import app
from tests.loaders import across, every
from tools import clients, measured, schemas
from tools.contract import RELEASES

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "bench/results/gpu_tests.md")
MARKED = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# What each code means, in the order of the table; the codes themselves come from the source code.
CODES = {
    "bad_json": "The text is not JSON, or not a JSON object.",
    "wrong_type": "A value of another type than expected.",
    "unknown_field": "An object has a field that does not exist.",
    "missing_field": "A required field is missing.",
    "unknown_name": "A name, site, op or mode that does not exist. The message suggests a similar name.",
    "unknown_version": "The spec's `version` is not 1.",
    "out_of_range": "A number or name outside its bounds, such as a feature that the dictionary does not have.",
    "not_finite": "NaN or infinity.",
    "zero_vector": "A vector of zeros, which has no direction.",
    "conflict": "Two values that are valid on their own contradict each other.",
    "duplicate": "Something that may appear only once appears twice.",
    "empty_scope": "The scope holds no token of this request, or of any request.",
    "too_large": "The request may read more bytes than `--max-read-mib` allows, or keep more than `--max-results-mib`.",
    "results_full": "The results that are kept leave no room for one client's. Delete some, or wait until they expire.",
    "too_many": "A limit on size or count is exceeded.",
    "unknown_max_act": "`unit: max_act` needs maximum activations; `saesteer calibrate` measures them.",
    "not_served": "The spec is correct, but this version or server cannot do it.",
    "unreadable": "The file of a dictionary that is served by rows has changed, or is gone. Start the server again.",
    "dose": "A token was changed by more than `--max-dose` under `--max-dose-action refuse`.",
    "gone": "A name in the request was replaced or deleted before the request ran. Send it again.",
    "shared": "A request with the same edits failed while this one was reading its cache. Send it again.",
    "no_space": "A result, or what a consumer keeps, could not be written to the server's disk.",
    "broken": "The worker could not apply the edits. Only this request ends.",
    "non_finite": "Under `--fail-fast`: hidden states or logits held NaN or infinity. Only this request ends.",
    "collapsed": "Under `--fail-fast`: the answer repeats itself, with a period of up to 16 tokens. Only it ends.",
    "consumer": "A consumer that the request names failed for it, which is no mistake in the request. Only it ends.",
    "no_room": "Admin routes: a site's pool is full (the message names `--pool-rows`), or there are 4,096 names.",
    "no_site": "Admin routes: the server has no op where the vector belongs. The message names `--sites`.",
    "in_use": "Admin routes: a module uses the name, it is that of the default module, or one is required.",
    "admin_off": "Admin routes: the server has no admin key.",
    "wrong_key": "Admin routes: the `Authorization` header does not hold the admin key.",
    "wrong_host": "The server needs no key on a loopback address, and the `Host` header names another host.",
}
_FAILURES = ("GONE", "DOSE", "BROKEN", "SHARED", "NON_FINITE", "COLLAPSED")
STATUS = {
    **STATUS,
    "no_room": 409,
    "no_site": 409,
    "in_use": 409,
    "admin_off": 403,
    "wrong_key": 401,
    "wrong_host": 403,
}


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = [list(map(str, row)) for row in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: object) -> str:
    """The text as code; an unescaped bar would end a cell."""
    return f"`{text}`".replace("|", "\\|")


def formats() -> str:
    """The formats of dictionaries, in the order in which they are tried, with the first line of each file."""
    rows = []
    for name, one in FORMATS.items():
        module: Any = inspect.getmodule(one)
        file = f"{module.__name__.removeprefix('saesteer.').replace('.', '/')}.py"
        about = str(inspect.getdoc(module)).splitlines()[0].partition(";")[0].rstrip(".").replace("``", "`")
        rows.append((code(name), about, f"[{file}](../{file})"))
    return table(("format", "files", "read by"), rows)


def dictionaries() -> str:
    """What is read of each format: kinds, activations and sites, each with a case of tests/loaders that shows it."""
    found: dict[tuple[str, str], tuple[dict[str, str], dict[str, str]]] = {}
    cases: list[tuple[str, Callable[[Path], Path], str | None]]
    cases = [(case.name, case.write, None) for case in every.CASES]
    cases += [(*told[:2], None) for told in every.DESCRIBED]
    cases += [(case.name, case.write, "mlp_in.1") for case in across.cases()]
    with tempfile.TemporaryDirectory() as folder:
        for name, write, site in cases:
            info = describe(str(write(Path(folder) / name)), site=site)
            activations, places = found.setdefault((info.format, info.kind), ({}, {}))
            case = name.removeprefix(f"{info.format}-")
            activations.setdefault(info.activation, case)
            places.setdefault(_between(info), case)

    def listed(shown: dict[str, str]) -> str:
        return ", ".join(f"{what} ({case})" for what, case in shown.items())

    rows = sorted(found.items(), key=lambda one: list(FORMATS).index(one[0][0]))
    return table(
        ("format", "kind", "activations, each with a test case", "sites, each with a test case"),
        (
            (code(form), kind, listed(dict(sorted(acts.items()))), listed(places))
            for (form, kind), (acts, places) in rows
        ),
    )


def _between(info: CoderInfo) -> str:
    read, written = (site and code(site.partition(".")[0]) for site in (info.site_in, info.site_out))
    if read == written:
        return read or "named by `@SITE`"
    return f"{read or 'unnamed'} → {written or 'unnamed'}{' of each later layer' * (info.targets is not None)}"


def vector_files() -> str:
    """The suffixes of vector files."""
    return ", ".join(map(code, READERS)) + "\n"


def families() -> str:
    """The model families, with the rows of tests/tiny.py that show all cells of a family in a real engine."""
    head = ("family", "decoder layer in vLLM", "in Transformers", *(f"`{kind}` in vLLM" for kind in SERVED_KINDS))
    tested = [ast.literal_eval(key) for key in _value("tests/tiny.py", "ROWS").keys if key is not None]
    rows = []
    for one in FAMILIES:
        shown = [row for row in tested if row.partition(",")[0] == one.name]
        assert shown, f"no row of tests/tiny.py shows {one.name}"
        cells = (_tap(one.sites[kind].vllm) if kind in one.sites else "none" for kind in SERVED_KINDS)
        rows.append(
            (one.name, code(one.vllm), code(one.transformers), *cells, ", ".join(code(f"[{n}]") for n in shown))
        )
    return table((*head, "test"), rows)


def _tap(tap: Tap) -> str:
    return f"{'before' if tap.side == 'in' else 'after'} {code(tap.module)}{' of the next layer' if tap.next else ''}"


def kinds() -> str:
    """The kinds of sites."""
    served = set(SERVED_KINDS)
    alone = "only as what a transcoder reads"
    return table(("kind", "served"), ((code(one), "yes" if one in served else alone) for one in sites.KINDS))


def commands() -> str:
    """The commands of `saesteer`."""
    return table(
        ("command", "does"), ((code(f"saesteer {name}"), _sentence(one.help)) for name, one in _commands().items())
    )


def flags() -> str:
    """The flags of all commands, with the commands that have them."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, command in _commands().items():
        for one in command.params:
            if one.param_type_name == "option":
                value = "" if one.is_flag else one.metavar or "VALUE"
                flag = f"{one.opts[0]} {value}".strip()
                found.setdefault((flag, one.help), []).append(name)
    rows = ((code(flag), ", ".join(names), about.replace("|", "\\|")) for (flag, about), names in found.items())
    return table(("flag", "commands", "meaning"), rows)


def limits() -> str:
    """Limits of one request."""
    low, usual, high = config.LIMITS["max_edits"]
    vectors = config.LIMITS["inline_rows"]
    rows = (
        ("edits in one spec, including the edits of its modules", spec.MAX_EDITS),
        (
            "table entries: features or vectors times windows, plus conditions",
            f"{usual} (`--max-edits`, {low} to {high})",
        ),
        (
            "different vectors, and features from files, brought for one site",
            f"{vectors[1]} (`--inline-rows`, {vectors[0]} to {vectors[2]})",
        ),
        ("intervals in the `positions` of all scopes", edits.MAX_POSITIONS),
        ("conditions in one `when`", edits.MAX_CONDITIONS),
        ("different conditions that edits wait for at one site", plan.MOST_CONDITIONS),
        ("rules of one request, and different features and probes that they watch", plan.MOST_RULES),
        ("levels of modules inside one another", expand.MAX_DEPTH),
        ("reads of each kind in `return`", returns.MAX_READS),
        ("strongest features of a token, and features that one read names", returns.MAX_TOP_K),
        (
            "consumers, and characters of JSON in all of their parameters",
            f"{returns.MAX_CONSUMERS}; {returns.MAX_PARAMETERS:,}",
        ),
        ("characters of a name", fields.MAX_NAME),
        ("characters of the spec as JSON, where it comes as a text", f"{spec.MAX_CHARACTERS:,}"),
        ("numbers in a vector given as a list", inline.MAX_LIST),
        (
            "bytes of a vector given in base64, decoded; of all vectors in a spec, with 4 for each number of a list",
            f"{inline.MAX_BYTES:,}; {spec.MAX_VECTORS:,}",
        ),
        ("bytes of a settings file", f"{settings.MAX_FILE_BYTES:,}"),
    )
    return table(("what", "at most"), rows)


def codes() -> str:
    """The error codes, as found in the source code."""
    found = {*fields.CODES, *_registry_codes(), *_admin_codes()}
    found |= {_constant("saesteer/plugin/results/forms.py", name) for name in _FAILURES}
    found |= {_constant("saesteer/plugin/results/consuming.py", name) for name in ("FAILED", "SPACE")}
    assert found == CODES.keys(), f"describe in tools/tables.py: {sorted(found ^ CODES.keys())}"
    return table(
        ("code", "HTTP", "meaning"), ((code(one), STATUS.get(one, 400), about) for one, about in CODES.items())
    )


def routes() -> str:
    """The routes that serve the field."""
    served = _constant("saesteer/plugin/http/routes.py", "SERVED")
    return "".join(f"- {code(f'POST {path}')}\n" for path in served)


def hook_table() -> str:
    """Every function of vLLM that the plugin replaces, calls or reads."""
    uses = {"": "replaced by", "late": "replaced, in newer versions, by", "instance": "replaced on one object by"}
    processes = {"stock": "every process, always", "every": "every process"}
    processes |= {"http": "HTTP server", "offline": "offline `LLM`", "worker": "worker"}
    rows = (
        (
            code(f"{one.module}.{one.path}({', '.join(one.parameters)})"),
            processes[one.process],
            f"{uses.get(one.use, 'used by')} {code(one.place)}",
            one.why,
        )
        for one in contract.HOOKS
    )
    return table(("function, with the parameters that matter", "process", "what happens", "why"), rows)


def metric_table() -> str:
    """The metrics, as they are registered with prometheus_client."""
    found: list[tuple[str, str, str]] = []

    def recorder(kind: str) -> Callable[..., Mock]:
        def record(name: str, about: str, labels: Iterable[str] = (), **_: object) -> Mock:
            labels = f"{{{','.join(labels)}}}" if labels else ""
            found.append((code(f"{name}{'_total' if kind == 'counter' else ''}{labels}"), kind, about))
            return Mock()

        return record

    with (
        patch.object(prometheus_client, "Counter", recorder("counter")),
        patch.object(prometheus_client, "Gauge", recorder("gauge")),
        patch.dict(metrics._families),
    ):
        metrics.install.__wrapped__()
    return table(("metric", "type", "meaning"), found)


def refusals() -> str:
    """What of vLLM cannot be served; those that have no check in the table itself are found later than at start."""
    rows = ((one.option.replace("{}", "…"), one.why) for one in unservable.ALL)
    return table(("refused", "why"), rows)


def published() -> str:
    """Figures that other systems have published, next to ours."""
    rows = json.loads((ROOT / "bench/published.json").read_text())
    keys = ("system", "what", "figure", "hardware", "source")
    assert all(tuple(row) == keys for row in rows), f"expected {keys}"
    shown = ((*(row[key] for key in keys[:-1]), f"[source]({row['source']})") for row in rows)
    return table(keys, shown)


def stored(made: Callable[[], measured.Table], command: str, chart: str = "") -> Callable[[], str]:
    """A table of what was measured."""
    return lambda: measured.block(table, made(), command, chart)


def versions() -> str:
    """The releases of vLLM that were looked at: one of each version that is served, and what was run with it."""
    low, high = contract.KNOWN
    assert [Version(one).minor for one in RELEASES] == [*range(low.minor, high.minor)], "make contract VLLM=..."
    said = ((one, run or "none: `make contract` alone", measured.on_gpus(one)) for one, run in RELEASES.items())
    return table(("vLLM", "tests run with it", "test files on GPUs"), said)


TABLES: dict[str, Callable[[], str]] = {
    "clients": clients.table,
    "codes": codes,
    "commands": commands,
    "dictionaries": dictionaries,
    "families": families,
    "flags": flags,
    "fork": stored(measured.fork, "python -m bench.fork CHECKOUT --out bench/results"),
    "formats": formats,
    "hooks": hook_table,
    "kinds": kinds,
    "gpu-tests": stored(measured.gpu_tests, "make test-gpu"),
    "lengths": stored(measured.lengths, "make bench-sweeps", "lengths.svg"),
    "limits": limits,
    "metrics": metric_table,
    "modes": stored(measured.modes, "make bench-modes"),
    "published": published,
    "refusals": refusals,
    "rivals": stored(measured.rivals, "python -m bench.rivals --out bench/results"),
    "routes": routes,
    "steps": stored(measured.steps, "make bench-steps"),
    "versions": versions,
    "versus": stored(measured.versus, "make bench-rivals"),
    "vector-files": vector_files,
}


def filled(page: str) -> str:
    """A page with up-to-date tables."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


def _commands() -> dict[str, Any]:
    found: Any = typer.main.get_command(app)
    return dict(found.commands)


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def _constant(file: str, name: str) -> Any:
    """A constant, read without importing its file: that needs vLLM, which takes seconds to import."""
    return ast.literal_eval(_value(file, name))


def _value(file: str, name: str) -> Any:
    """What a file assigns to a name, as syntax."""
    [value] = [
        node.value
        for node in _tree(file).body
        if isinstance(node, ast.Assign) and [getattr(target, "id", None) for target in node.targets] == [name]
    ]
    return value


def _calls(file: str, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def _registry_codes() -> set[str]:
    """The codes of every RegistryError that is raised."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "saesteer").rglob("*.py")]
    raised = (call for file in files for call in _calls(file, "RegistryError"))
    return {ast.literal_eval(word.value) for call in raised for word in call.keywords if word.arg == "code"}


def _admin_codes() -> set[str]:
    """The codes with which requests are refused before a spec is read, and admin routes where no error has its own."""
    calls = [*_calls("saesteer/plugin/http/admin.py", "refuse"), *_calls("saesteer/plugin/http/access.py", "refuse")]
    found = {call.args[2].value for call in calls if len(call.args) > 2 and isinstance(call.args[2], ast.Constant)}
    return {*map(str, found), _constant("saesteer/plugin/http/access.py", "WRONG_KEY")}


if __name__ == "__main__":
    schemas.FILE.write_text(schemas.written())
    for path in PAGES:
        path.write_text(filled(path.read_text()))
        print(path.relative_to(ROOT))
