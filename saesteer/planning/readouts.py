"""What a request reads: which tensors, at which positions, and how many bytes come home. Knows no edit and no weights.

Each read of ``saesteer.language.returns`` becomes one ``Readout`` (plan.py), or is refused by name. Read-outs change
nothing, so they are in no key of the KV cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from saesteer.language import sites
from saesteer.language.edits import Scope
from saesteer.language.fields import closest, fail, listing, step
from saesteer.language.returns import ActivationRead, FeatureRead, ProbeRead, Return
from saesteer.language.rules import Watched
from saesteer.language.sites import canonical, is_pregain, parse
from saesteer.planning.lookup import check_feature, dictionary_of, hint_of, read_probe, reading_site
from saesteer.planning.plan import CAPTURE, END, Catalog, Direction, Plan, Readout, Window
from saesteer.planning.reductions import is_by_message
from saesteer.planning.windows import windows_of_read


def readouts(
    returns: Return, catalog: Catalog, prompt_len: int, starts: Sequence[int] | None = None
) -> tuple[Readout, ...]:
    """The read-outs of a request, in the order of ``return``.

    Args:
        returns: what it asks for.
        catalog: what the server has.
        prompt_len: the length of the prompt, in tokens.
        starts: where the chat messages begin, and behind them the generation prompt; None: it is no chat.

    Raises:
        SpecError: a name is unknown, a number is out of range, a site's tensor is not kept, a scope in the prompt holds
            no token, two reads are one, or this version does not serve the read.
    """
    at = "saesteer.return"
    makers: dict[str, Callable[[Any, Catalog, str], Iterator[Readout]]] = {
        "features": _features,
        "probes": _probe,
        "activations": partial(_activations, starts),
    }
    found = []
    for name, made in makers.items():
        for i, one in enumerate(getattr(returns, name)):
            found += [_placed(own, one, catalog, prompt_len) for own in made(one, catalog, f"{at}.{name}[{i}]")]
    if returns.hidden:
        whole = Readout("hidden", f"{at}.hidden", None, None, True, (), last=returns.hidden is True)
        found.append(whole if whole.last else _placed(whole, returns.hidden, catalog, prompt_len))
    first: dict[object, str] = {}
    for one in found:  # two reads may be one in other words, such as a dictionary with and without its only layer
        same = first.setdefault((one.kind, one.site, one.after, one.dictionary, one.probe), one.field)
        if same != one.field:
            fail(one.field, "duplicate", f"reads what {same} reads, expected it once")
    _check_consumers(returns, catalog, f"{at}.consumers", reads=bool(found))
    return tuple(found)


def captures(sites_: Sequence[str], plan: Plan, catalog: Catalog) -> tuple[Readout, ...]:
    """The read-outs of a request, and behind them what only the operator captures: all tokens, at these sites.

    Args:
        sites_: canonical names. One where ``behind_sums`` would refuse a read is left out.
        plan: of the request; a read of the same rows serves both.
        catalog: the catalog that it was planned with.
    """
    edited, parts = _edited(plan, catalog)
    own, every = plan.readouts, ((0, END),)
    added = [
        Readout("activation", CAPTURE, one, one, False, every, summed=one in parts, recompute=False, captured=True)
        for one in sites_
        if not (one in parts and one in edited)
    ]
    shared = (one for one in own if not one.whole)
    rows = {replace(one, field=CAPTURE, inline=True, recompute=False, captured=True): one for one in shared}
    serving = {rows[one] for one in added if one in rows}
    both = (replace(one, captured=True) if one in serving else one for one in own)
    return (*both, *(one for one in added if one not in rows))


def behind_sums(plan: Plan, catalog: Catalog) -> Plan:
    """The plan, whose read-outs before the edits of a site come after all that its op makes, which come earlier.

    That is an edit of a part of the sum. For mlp_in_pregain, which comes behind resid_mid, it is any edit of the op.

    Raises:
        SpecError: the op makes edits of both, between which it captures nothing.
    """
    if not (plan.readouts or plan.measures):
        return plan
    edited, parts = _edited(plan, catalog)
    if not edited:
        return plan

    def placed(one: Readout) -> Readout:
        if one.after or one.op not in parts.keys() | edited:
            return one
        if one.site == one.op:  # else mlp_in_pregain, of what the op of resid_mid leaves
            if one.op not in parts:
                return one
            if one.op in edited:
                place = f"after those of {parts[one.op]}, where this server has no op"
                message = f"reads {one.site} before edits of {one.op} and {place}"
                fail(one.field, "not_served", f"{message}; start it with --sites {parts[one.op]} to have one there")
        return replace(one, summed=True)

    readouts = tuple(map(placed, plan.readouts))
    for one in readouts:
        if one.whole and any(one.field == other.field and one.summed != other.summed for other in readouts):
            message = (
                f"reads {one.site} after edits that come before it, and other sites before all edits, as one tensor"
            )
            fail(one.field, "not_served", f"{message}; expected a read for each of them")
    return replace(plan, readouts=readouts, measures=tuple(map(placed, plan.measures)))


def _edited(plan: Plan, catalog: Catalog) -> tuple[set[str], dict[str, str]]:
    """The sites that a plan edits, and of those whose edits the op of their sum makes, each by the site of the sum."""
    edited = {group.site for group in plan.groups}
    return edited, {op: site for site in edited if (op := catalog.op_site(site)) != site}


def first_recomputed(found: Sequence[Readout], prompt_len: int) -> int | None:
    """The lowest position of the prompt that must be computed even if the prefix cache has it; None: there is none."""
    starts = [one.windows[0][0] for one in found if one.recompute and one.windows]
    lowest = min(starts, default=prompt_len)
    return lowest if lowest < prompt_len else None


def declared(found: Sequence[Readout], catalog: Catalog, end: int, itemsize: int) -> list[int]:
    """How many bytes each read-out of a request may bring home, for one choice.

    Args:
        found: its read-outs.
        catalog: the catalog that they were planned with, which knows the widths.
        end: the position behind the last token that is read, if the request runs to its length (windows.py).
        itemsize: bytes of one number of an activation.
    """
    return [most_rows(one, end) * _row_bytes(one, catalog, itemsize) for one in found]


# Bytes of an answer's objects for each that comes home: the index and value of a strongest feature take 128, the value
# of a named one 64, and a probe's score 32.
_IN_ANSWERS = {"features": 16, "probe": 8}


def in_answers(one: Readout) -> int:
    """How many bytes of an answer stand for one that comes home; rows travel as they are."""
    return _IN_ANSWERS.get(one.kind, 1)


def refuse_above(limit: int, size: int, at: str = "saesteer.return", how: str = "") -> None:
    """Refuse a request that may read or watch more bytes than the server takes.

    Args:
        limit: bytes for one request.
        size: what the request declares.
        at: path of what declares them.
        how: words behind the bytes.

    Raises:
        SpecError: it declares more.
    """
    if size > limit:
        message = f"may read {size} bytes{how}, expected at most {limit}: read or watch fewer tokens, or reduce them"
        fail(at, "too_large", f"{message}; the server takes more when started with --max-read-mib")


def most_rows(one: Readout, end: int) -> int:
    """How many rows of a read-out come home if the sequence ends before a position."""
    if one.last:
        return 1
    count = sum(max(0, min(high, end) - low) for low, high in one.windows)
    return count if one.reduced_there == "none" else min(count, len(one.starts) or 1)


def _row_bytes(one: Readout, catalog: Catalog, itemsize: int) -> int:
    if one.kind == "features":
        return 8 * one.top_k + 4 * len(one.features)  # a strongest feature has an index and a value
    if one.kind == "probe":
        return 4
    width = catalog.width if one.site is None else catalog.width_at(one.site)
    assert width is not None, "a server knows its widths"
    return width * (itemsize if one.reduced_there == "none" else 4)  # reductions are float32


def measure(one: Watched, windows: tuple[Window, ...], catalog: Catalog, at: str) -> Readout:
    """What a condition of a rule compares, before the request's edits of the site: a feature or a probe.

    Args:
        one: the condition.
        windows: where it is watched.
        catalog: what the server has.
        at: path of the condition.

    Raises:
        SpecError: a name is unknown, a number is out of range, or a site's tensor is not kept.
    """
    if one.probe is not None:
        site, op, probe = _probe_at(one.probe, one.site, catalog, at)
        return Readout("probe", at, site, op, False, windows, probe=probe)
    assert one.dictionary is not None and one.feature is not None
    key, site, op = _dictionary_at(one.dictionary, one.layer, catalog, at, whole=False)
    check_feature(key, catalog.dictionaries[key], one.feature, f"{at}.feature")
    return Readout("features", at, site, op, False, windows, dictionary=key, features=(one.feature,))


def _placed(found: Readout, one: Any, catalog: Catalog, prompt_len: int) -> Readout:
    """The read-out at the positions of its read's scope.

    Generated tokens that will never be inputs are no mistake, an empty prompt scope is.
    """
    check_scope(one.scope, catalog, found.field)
    spans = windows_of_read(one.scope, prompt_len)
    if not spans:
        message = f"holds no position with a prompt of {prompt_len} tokens, expected at least one"
        fail(f"{found.field}.scope", "empty_scope", message)
    return replace(found, windows=spans, recompute=one.cached == "recompute", part=one.scope.part)


def _features(one: FeatureRead, catalog: Catalog, at: str) -> Iterator[Readout]:
    whole = one.strongest > 0
    key, site, op = _dictionary_at(one.dictionary, one.layer, catalog, at, "dictionary", whole=whole)
    info = catalog.dictionaries[key]
    if info.by_rows and len(one.features) > catalog.max_entries:
        message = f"got {len(one.features)} features, whose rows come with the request"
        fail(f"{at}.features", "too_large", f"{message}, expected at most {catalog.max_entries}: see --max-edits")
    for i, feature in enumerate(one.features):
        check_feature(key, info, feature, f"{at}.features[{i}]")
    if one.top_k is not None and one.top_k > info.features:
        expected = f"at most {info.features}, the features of dictionary {key!r}"
        fail(f"{at}.top_k", "out_of_range", f"got {one.top_k}, expected {expected}")
    after, most = _is_after(one.at, site, at), min(one.strongest, info.features)
    yield Readout("features", at, site, op, after, (), dictionary=key, top_k=most, features=one.features)


def _probe(one: ProbeRead, catalog: Catalog, at: str) -> Iterator[Readout]:
    site, op, probe = _probe_at(one.probe, one.site, catalog, at)
    yield Readout("probe", at, site, op, _is_after(one.at, site, at), (), probe=probe)


def _activations(starts: Sequence[int] | None, one: ActivationRead, catalog: Catalog, at: str) -> Iterator[Readout]:
    by_message = is_by_message(one.reduce)
    if by_message and starts is None:
        message = "got message, but only chat requests with nothing but text have messages"
        fail(f"{at}.reduce", "not_served", f"{message}; expected mean")
    names, whole = _kept_sites(one, catalog, f"{at}.site"), len(one.site) > 1 or one.site[0] in sites.KINDS
    rows = tuple(starts or ()) if by_message else ()
    places = set()
    for name in names:
        site = canonical(name)
        _refuse_pregain(site, f"{at}.site")
        op = sites.reading_site(site)
        _check_kept(catalog, op, name, f"{at}.site")
        places.add((catalog.width_at(site), catalog.stage_of(site)))
        if len(places) > 1:
            message = f"reads {names[0]} and {name} as one tensor, which differ in width or pipeline stage"
            fail(f"{at}.site", "not_served", f"{message}; expected a read for each of them")
        after, inline = _is_after(one.at, site, at), one.transport == "inline"
        yield Readout("activation", at, site, op, after, (), reduce=one.reduce, starts=rows, whole=whole, inline=inline)


def _kept_sites(one: ActivationRead, catalog: Catalog, at: str) -> tuple[str, ...]:
    """The sites of a read, as written; of a kind alone, those that the server keeps."""
    kind = one.site[0]
    if kind not in sites.KINDS:
        return one.site
    kept = (catalog.sites or ()) if catalog.reads is None else catalog.reads
    layers = range(2 + max((parse(name)[1] for name in kept), default=0))  # resid_pre is a resid_post one layer before
    found = tuple(name for layer in layers if canonical(name := f"{kind}.{layer}") in kept)
    if not found:
        fail(at, "not_served", f"reads {kind}, of which this server keeps no tensor; start it with --reads {kind}.all")
    return found


def _dictionary_at(
    name: str, layer: int | None, catalog: Catalog, at: str, address: str = "feature", *, whole: bool
) -> tuple[str, str, str]:
    """The key of a dictionary that is read, the site where it reads, and the site whose op keeps the tensor."""
    key, info = dictionary_of(catalog, name, layer, at, address=address)
    if whole and info.by_rows:
        message = f"reads the strongest of {key!r}, which needs all of it, and this server reads only rows of features"
        fail(f"{at}.dictionary", "not_served", f"{message}; expected features by name")
    op = reading_site(catalog, key, info, at)
    _check_kept(catalog, op, op, f"{at}.dictionary")
    return key, canonical(str(info.site_in or info.site_out)), op


def _probe_at(name: str, named: str | None, catalog: Catalog, at: str) -> tuple[str, str, Direction]:
    """The site where a probe is read, the site whose op keeps the tensor, and the probe's row."""
    site, probe = read_probe(catalog, name, named, at)
    path = f"{at}.probe" if named is None else f"{at}.site"
    _refuse_pregain(site, path)
    op = sites.reading_site(site)
    _check_kept(catalog, op, site, path)
    return site, op, probe


def check_scope(scope: Scope, catalog: Catalog, at: str) -> None:
    """Refuse a part of the answer where nobody tells it, and messages; ``at`` is the path of what has the scope."""
    if scope.part is not None and not catalog.parts:
        message = "names a part of the answer, and no reasoning parser is there to tell it"
        fail(f"{at}.scope.part", "not_served", f"{message}; start the server with --reasoning-parser")
    if scope.messages is not None:
        why = "only chat requests with nothing but text have"
        if ".module." in at:
            why = "this version does not serve in modules"
        fail(f"{at}.scope.messages", "not_served", f"names chat messages, which {why}; expected positions")


def _check_kept(catalog: Catalog, op: str, named: str, path: str) -> None:
    """Refuse to read where the server has no op, or one that keeps no tensor."""
    if not catalog.has_op(op):
        why = "where this server has no op"
    elif catalog.reads is not None and op not in catalog.reads:
        why = "whose tensor this server does not keep"
    else:
        return
    fail(path, "not_served", f"reads {named}, {why}; {hint_of(catalog, op, '--reads')}")


def _refuse_pregain(site: str, at: str) -> None:
    """Only encoders normalise resid_mid, so there is no tensor of that name."""
    if is_pregain(site):
        layer, found = parse(site)[1], f"got {site}, which only dictionaries read"
        fail(at, "not_served", f"{found}, expected resid_mid.{layer} or mlp_in.{layer}")


def _is_after(moment: str, site: str, at: str) -> bool:
    if moment == "after" and is_pregain(site):
        fail(f"{at}.at", "conflict", f"got after, but nothing can be written at {site}, expected before")
    return moment == "after"


def _check_consumers(returns: Return, catalog: Catalog, at: str, *, reads: bool) -> None:
    for one in returns.consumers:
        path = step(at, one.name)
        if one.name not in catalog.consumers:
            known = f"expected {listing(catalog.consumers)}: those that the operator switched on with --consumer"
            fail(path, "unknown_name", f"is no consumer of this server{closest(one.name, catalog.consumers)}, {known}")
        catalog.consumers[one.name](one.parameters, path)
    if returns.consumers and not reads:
        fail(at, "conflict", "is given, but the request reads nothing for them, expected a read next to it")
