"""Turns a request into a plan, checked against the server, and the plan's runs, before the engine takes it.

Knows plans, digests and the fields of vLLM's requests. frontend.py calls it. The runs describe what is edited at each
position; prefix_cache.py makes the keys of the cache's blocks from them.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from threading import Lock
from typing import Any
from uuid import uuid4

from vllm.sampling_params import RequestOutputKind

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.consumers.known import Consumers
from saesteer.engine.doses import sites_of
from saesteer.engine.encode import encode
from saesteer.engine.sinks import SPOOLS, address
from saesteer.language.alike import parts_of
from saesteer.language.fields import fail
from saesteer.language.spec import Spec
from saesteer.planning.answers import Reported, reported, spooled
from saesteer.planning.applied import applied
from saesteer.planning.immutable import immutable
from saesteer.planning.messages import by_message, named, resolve
from saesteer.planning.plan import END, Catalog, Clamps, Feature, Plan, Readout
from saesteer.planning.planner import plan
from saesteer.planning.readouts import captures, declared, first_recomputed, in_answers, most_rows, refuse_above
from saesteer.planning.runs import Run, contents, runs
from saesteer.planning.windows import Scopes, refuse_unmet, scopes_of
from saesteer.plugin.door.borders import Borders
from saesteer.plugin.door.conversation import Conversation
from saesteer.plugin.door.logs import summary
from saesteer.plugin.door.refusals import refuse_steering
from saesteer.plugin.door.rows import Fetching
from saesteer.plugin.http.exchange import exchange
from saesteer.plugin.prefix_cache import FIRST, RUNS
from saesteer.plugin.reasoning import BORDER, PARSER, border_of
from saesteer.plugin.results.consuming import Wanted
from saesteer.plugin.results.forms import RULES, WHOLE, sent
from saesteer.plugin.results.kept import Results
from saesteer.plugin.results.report import Report
from saesteer.plugin.results.spools import Layout, Spool

_Key = tuple[int, int | None]  # hash of a spec; length of the prompt, where the meaning depends on it
_FILES = 4  # times as many bytes as an answer may have, a request may read by handle
_KNOWN = 64  # specs; one with a vector for every layer of a 27B model holds 0.7 MB
_LETTERS = 16  # of a digest in a header, as of versions
_LARGEST = 2**20  # bytes that a spec brings; one that brings more is planned for each request


@immutable
class Meaning:
    """What a spec does to prompts of one length, or of any length if none of its scopes counts from the prompt."""

    edits: int  # how many it has, of all sites
    digest: str  # of what they do, and where
    applied: Callable[[], Sequence[dict[str, Any]]]  # makes what an answer reports, without counts
    sites: tuple[str, ...]  # where doses are measured
    runs: tuple[Run, ...]  # which edits each position has
    admitted: Mapping[str, Any]  # what takes the spec's place in extra_args, for the worker
    readouts: Sequence[Reported]  # what it reads, and behind that what only the operator captures
    first: tuple[int | None, int | None]  # the first position that is read: of those to be recomputed, and of all
    rules: Sequence[Sequence[Any]]  # as they travel to the scheduler
    measures: Sequence[Readout]  # what they watch
    scopes: Scopes  # of the request's own edits and rules
    parts: bool  # whether a scope names a part of the answer
    edits_part: str | None  # path of the first edit whose scope does
    rows: Mapping[Feature, str]  # features that come from files, each with the path of its first mention


class Door:
    """Admits the requests of a server, and keeps what recent specs mean: most are requested more than once.

    Safe to use in threads: no thread waits while another's spec is planned, and two that ask for the same spec at the
    same time may both plan it. A new catalog starts empty, since names stand for something else there.

    Args:
        server: fingerprint of the server's dictionaries and limits.
        config: the operator's settings, of which the limit for doses counts here; None: no limit.
        fetching: the dictionaries that are served by rows; None: there are none.
        vllm_config: vLLM's; None: there is no limit for what is read, and no reasoning parser.
        consumers: those that the operator has switched on.
        capture: canonical names of the sites that the operator captures.
    """

    def __init__(
        self,
        server: str = "",
        config: SaesteerConfig | None = None,
        fetching: Fetching | None = None,
        vllm_config: Any = None,
        consumers: Consumers | None = None,
        capture: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.fetching = fetching
        self.consumers = consumers or Consumers({})
        self._capture = capture
        usual = config or SaesteerConfig()
        self.results = Results(usual.max_results_mib << 20, usual.result_seconds)
        self._server = server
        self._vllm_config = vllm_config
        self._model = model = None if vllm_config is None else vllm_config.model_config
        self._dtype = "float32" if model is None else str(model.dtype).removeprefix("torch.")
        self._catalog: Catalog | None = None
        self._kept: dict[_Key, tuple[object, Meaning]] = {}  # what was asked, and its meaning
        self.borders = Borders(vllm_config)
        self._lock = Lock()

    def captures(self, request: Any) -> bool:
        """Whether the operator captures what a request without a spec computes; some cannot be read, and are served."""
        return bool(self._capture) and _has_ids(request)

    def admit(
        self,
        spec: Spec,
        catalog: Catalog | None,
        request: Any,
        conversation: Conversation | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        silent: bool = False,
    ) -> Spec:
        """Check a spec against the server and its request, put its plan in its place, and keep the KV cache apart.

        Args:
            spec: what the request asks for.
            catalog: what the server has; None: it has nothing of saesteer's.
            request: vLLM's.
            conversation: of a chat with nothing but text.
            template: what the template of a chat was given; None: what the conversation says.
            silent: the client asks for nothing, and its answer says nothing.

        Returns:
            The spec with positions instead of the chat messages that it names.

        Raises:
            SpecError: the spec asks for what this server does not have.
        """
        if catalog is None:
            refuse_steering()
        if not spec.defaults and self.config is not None and "default" in self.config.require:
            found = "is false, but this server steers every request (--require default)"
            fail(f"{KEY}.defaults", "not_served", f"{found}; expected true")
        if not _has_ids(request):
            found = "prompts given as embeddings or as streams are not served by this version"
            fail(KEY, "not_served", f"{found}; send text or token ids")
        ids = request.prompt_token_ids
        messages = None
        if conversation is not None:
            spec, messages = located(spec, catalog, ids, conversation)
        starts = None
        if messages is not None and by_message(spec.returns):
            starts = tuple(one["start"] for one in messages)
        meaning = self.meaning(spec, catalog, len(ids), starts)
        params = request.sampling_params
        if template is None and conversation is not None:
            template = conversation.chat_params.chat_template_kwargs
        told = self.borders.told(ids, conversation, template or {}) if meaning.parts else None
        ended = END  # where the prompt ends the reasoning
        if told and (meaning.edits_part or any(part for _, part in meaning.scopes)):
            ended = border_of(self._vllm_config, told, ids).found
        border = self.borders.edited(meaning.edits_part, told, ended) if meaning.edits_part and told else None
        end = self._end(len(ids), params)
        refuse_unmet(meaning.scopes, len(ids), end, ended)
        limit = None if self.config is None else self.config.max_dose
        measured = spec.returns.dose or limit is not None
        shown = [one for one in meaning.readouts if one.readout.shown]
        reads_part = any(one.readout.part for one in shown)
        wanted = None
        if spec.returns.consumers or any(one.readout.captured for one in meaning.readouts):
            wanted = Wanted.of(self.consumers, spec.returns.consumers)
        rooms = self._bound(shown, meaning.measures, catalog, end, params) if shown or meaning.measures else []
        params.saesteer_report = Report(
            meaning.applied,
            meaning.sites if measured else None,
            limit,
            readouts=meaning.readouts,
            rooms=rooms,
            kept=[] if (of := exchange()) is None else of.kept,
            messages=messages,
            wanted=wanted,
            silent=silent,
            watches=bool(meaning.rules),
            border=partial(border_of, self._vllm_config, told, ids) if told and (reads_part or border) else None,
        )
        kind = getattr(params, "output_kind", None)
        whole = wanted is None and kind == RequestOutputKind.FINAL_ONLY and not params.stop
        digest = hashlib.sha256(f"{self._server} {meaning.digest}".encode()).hexdigest()[:_LETTERS]
        params.saesteer_mark = f"{meaning.edits}; digest={digest}"
        own = {**meaning.admitted, WHOLE: whole}
        params.extra_args = {**(params.extra_args or {}), KEY: own}
        # Consumers get rows in this process, and of several choices the engine knows no numbers.
        if rooms and any(map(spooled, shown)) and not spec.returns.consumers and (params.n or 1) == 1:
            own[SPOOLS] = address(_files(meaning.readouts, rooms))
        if meaning.first != (None, None):
            own[FIRST] = meaning.first
        if meaning.rules:
            own |= {RULES: meaning.rules, PARSER: told}
        if meaning.edits:
            refusing = self.config is not None and self.config.max_dose_action == "refuse"
            # A cached token is not measured again, and the request that computed it may be refused for it later. Where
            # a part of an answer begins follows from the tokens, from what ends the reasoning, and from the prompt's
            # end, behind which it is looked for; so in the prompt, no part of an answer matters.
            apart = [(0, uuid4().hex if refusing else None)]
            if border and not refusing:
                apart.append((len(ids), repr((border, len(ids)))))
            own[RUNS] = keyed(meaning.runs, self._server, apart)
        if border is not None:
            own[BORDER] = border
        return spec

    def _end(self, prompt_len: int, params: Any) -> int:
        """Return the position behind the last token that is an input of the model, if a request runs to its length."""
        longest = END if self._model is None else self._model.max_model_len
        return max(prompt_len, min(longest, prompt_len + (params.max_tokens or longest)) - 1)

    def _bound(
        self, readouts: Sequence[Reported], measures: Sequence[Readout], catalog: Catalog, end: int, params: Any
    ) -> list[Spool]:
        """Refuse a request that may read or watch too much; return the room for what its choices keep, in order."""
        if self._model is None or self.config is None:
            return []
        found, choices = [one.readout for one in readouts], params.n or 1
        itemsize = self._model.dtype.itemsize
        each = declared(found, catalog, end, itemsize)
        sizes = [(one, size, len(one.abouts)) for one, size in zip(readouts, each, strict=True)]
        bodies = sum(size * sites * in_answers(one.readout) for one, size, sites in sizes if one.readout.inline)
        bodies += sum(declared(measures, catalog, end, itemsize))
        files = sum(size * sites for one, size, sites in sizes if not one.readout.inline)
        at, limit = "saesteer.return" if readouts else measures[0].field, self.config.max_read_mib << 20
        refuse_above(limit, bodies * choices, at)
        refuse_above(_FILES * limit, (bodies + files) * choices, at, ", those by handle included")
        kept: list[Layout] = []
        for one, size, sites in sizes:
            if not one.readout.inline:
                if not spooled(one):  # also the rows of a part become one here
                    one = one._replace(readout=replace(one.readout, part=None))
                    [size] = declared([one.readout], catalog, end, itemsize)
                rows = most_rows(one.readout, end)
                kept.append(Layout(one.entries, rows, sites * size // max(1, rows)))
        return self.results.promise(kept * choices) if kept else []

    def meaning(self, spec: Spec, catalog: Catalog, prompt_len: int, starts: tuple[int, ...] | None = None) -> Meaning:
        """The meaning of a spec.

        Args:
            spec: without chat messages in its scopes.
            catalog: what the server has.
            prompt_len: the length of the prompt, in tokens.
            starts: where the chat messages begin, if the spec reduces something to a row for each.

        Raises:
            SpecError: it asks for what this server does not have.
        """
        asked = spec if starts is None else (spec, starts)
        number = hash(asked)  # once, as it takes a while
        with self._lock:
            found = self._find(asked, catalog, ((number, None), (number, prompt_len)))
        if found is None:
            planned = plan(spec, catalog, prompt_len, starts)
            rows = self.fetching.fetch(planned, catalog) if self.fetching else {}
            full = replace(catalog, rows=rows) if rows else catalog
            found = _meaning(spec, full, planned, self._dtype, self._capture)
            if _brought(spec, found.admitted) <= _LARGEST:
                with self._lock:
                    self._keep(catalog, (number, prompt_len if planned.relative else None), asked, found)
        elif self.fetching:
            self.fetching.check(found.rows.items())
        return found

    def _find(self, asked: object, catalog: Catalog, keys: Sequence[_Key]) -> Meaning | None:
        for key in keys if self._catalog is catalog else ():
            if key in self._kept and self._kept[key][0] == asked:
                self._kept[key] = self._kept.pop(key)  # the most recently used comes last
                return self._kept[key][1]
        return None

    def _keep(self, catalog: Catalog, key: _Key, asked: object, found: Meaning) -> None:
        if self._catalog is not catalog:
            self._catalog = catalog
            self._kept.clear()
        self._kept[key] = asked, found
        if len(self._kept) > _KNOWN:
            del self._kept[next(iter(self._kept))]


def _files(readouts: Sequence[Reported], rooms: Sequence[Spool]) -> Iterator[Sequence[Any]]:
    """The files that a worker may write, as ``address`` takes them; what the operator captures as well comes here."""
    spools = iter(rooms)
    for number, one in enumerate(readouts):
        if one.readout.shown and not one.readout.inline:
            spool = next(spools)
            if spooled(one) and not one.readout.captured:
                yield number, *spool.address


def _has_ids(request: Any) -> bool:
    """Whether the prompt has token ids, all of them now."""
    return request.prompt_token_ids is not None and not getattr(request, "resumable", False)


def _meaning(spec: Spec, catalog: Catalog, found: Plan, dtype: str, capture: Sequence[str] = ()) -> Meaning:
    whole = replace(found, readouts=captures(capture, found, catalog)) if capture else found
    admitted = {**encode(whole, catalog, dose=spec.returns.dose), "said": summary(spec)}
    edited = runs(found, contents(found, catalog))
    rows = found.rows(catalog) if catalog.rows else {}
    taken = (*found.readouts, *found.measures)
    starts = [one.windows[0][0] for one in taken if one.windows]
    # For a prompt of any length, as the meaning may be kept for others; where vLLM asks, the prompt's end bounds it.
    first = first_recomputed(taken, END), min(starts, default=None)
    told = reported(whole.readouts, catalog, dtype)
    edits_part = next((part.field for part in found.parts if part.part), None)
    return Meaning(
        sum(len(part.features) if isinstance(part, Clamps) else 1 for part in found.parts),
        hashlib.sha256(repr(edited).encode()).hexdigest(),
        cache(partial(applied, found, catalog)),
        sites_of(found, catalog),
        edited,
        admitted,
        told,
        first,
        sent(found.rules),
        found.measures,
        scopes_of(found),
        edits_part is not None or any(one.part for one in found.readouts) or any(one.part for one in found.rules),
        edits_part,
        rows,
    )


def _brought(spec: Spec, admitted: Mapping[str, Any]) -> int:
    """The bytes that are kept with a spec because it brings vectors, or because features come from files."""
    own = (getattr(part.first, "vector", None) for part in parts_of(spec.edits))
    lists = {id(one): len(one) for one in own if isinstance(one, tuple)}
    return 32 * sum(lists.values()) + sum(len(data) for *_, data in admitted["vectors"])


def needs_messages(spec: Spec) -> bool:
    """Whether a conversation has to be rendered: the spec names messages, or reads, and its answer tells of them."""
    return named(spec) or _reads(spec)


def _reads(spec: Spec) -> bool:
    return any(True for _ in spec.returns.scopes())


def located(
    spec: Spec, catalog: Catalog, ids: list[int], conversation: Conversation
) -> tuple[Spec, list[dict[str, Any]] | None]:
    """The spec with positions instead of the chat messages that it names, and where all of them stand, if it reads.

    Where they cannot be told, only a read that is reduced to a row for each is refused.

    Raises:
        SpecError: there is no such message, or the chat template cannot tell where one ends.
    """
    if named(spec):
        spec = resolve(spec, catalog, len(ids), conversation.roles, partial(conversation.spans, ids))
    if not _reads(spec):
        return spec, None
    messages = conversation.told(ids)
    if messages is None and (each := by_message(spec.returns)) is not None:
        conversation.spans(ids, [(n, n + 1) for n in range(len(conversation.messages))], each)  # says why
    return spec, messages


def keyed(found: Sequence[Run], server: str, own: Sequence[tuple[int, str | None]]) -> list[list[Any]]:
    """The runs as the engine gets them, with digests that are valid only on this server.

    A digest covers the content behind names, which may be replaced, so requests with the same name may share nothing.

    Args:
        found: the runs of the request's plan.
        server: fingerprint of the dictionaries and limits.
        own: from each of these positions on, what runs that begin there share with others that have the same; None:
            they share with all that have the same edits.
    """

    def digest(lo: int, edits: str) -> str:
        apart = next(one for start, one in reversed(own) if start <= lo)
        return hashlib.sha256(f"{server} {apart} {edits}".encode()).hexdigest()

    return [[lo, hi, digest(lo, edits)] for lo, hi, edits in found]
