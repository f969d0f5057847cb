"""Turns a request into a plan, checked against the server, and the plan's runs, before the engine takes it.

Knows plans, digests and the fields of vLLM's requests. frontend.py calls it. The runs describe what is edited at each
position; prefix_cache.py makes the keys of the cache's blocks from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any
from uuid import uuid4

from saesteer.config.config import KEY, SaesteerConfig
from saesteer.engine.doses import sites_of
from saesteer.engine.wire import encode
from saesteer.language.fields import fail
from saesteer.language.spec import Spec
from saesteer.planning.applied import applied
from saesteer.planning.by_rows import features_of
from saesteer.planning.digests import digest
from saesteer.planning.messages import named, resolve
from saesteer.planning.plan import Feature
from saesteer.planning.planner import Catalog, Plan, plan
from saesteer.planning.readouts import declared, first_recomputed, refuse_above
from saesteer.planning.runs import Run, change_digests, runs
from saesteer.plugin.door.conversation import Conversation
from saesteer.plugin.door.rows import Fetching
from saesteer.plugin.prefix_cache import FIRST, RUNS
from saesteer.plugin.results.counts import Report
from saesteer.plugin.results.reads import Reported, reported

_KNOWN = 64  # specs; one with a vector for every layer of a 27B model holds 0.7 MB


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a spec does to prompts of one length, or of any length if none of its scopes counts from the prompt."""

    edits: bool  # whether it edits anything
    applied: Sequence[dict[str, Any]]  # what an answer reports, without counts
    sites: tuple[str, ...]  # where doses are measured
    runs: tuple[Run, ...]  # which edits each position has
    admitted: Mapping[str, Any]  # what takes the spec's place in extra_args, for the worker
    readouts: Sequence[Reported]  # what it reads
    first: tuple[int | None, int | None]  # the first position that is read: of those to be recomputed, and of all
    rows: Mapping[Feature, str]  # features that come from files, each with the path of its first mention


class Door:
    """Admits the requests of a server, and keeps what recent specs mean: most are requested more than once.

    Safe to use in threads: no thread waits while another's spec is planned, and two that ask for the same spec at the
    same time may both plan it. A new catalog starts empty, since names stand for something else there.

    Args:
        server: fingerprint of the server's dictionaries and limits.
        config: the operator's settings, of which the limit for doses counts here; None: no limit.
        fetching: the dictionaries that are served by rows; None: there are none.
        model: vLLM's configuration of the model; None: there is no limit for what is read.
    """

    def __init__(
        self,
        server: str = "",
        config: SaesteerConfig | None = None,
        fetching: Fetching | None = None,
        model: Any = None,
    ) -> None:
        self.config = config
        self.fetching = fetching
        self.default = None if config is None else config.default_module
        self._server = server
        self._model = model
        self._dtype = "float32" if model is None else str(model.dtype).removeprefix("torch.")
        self._catalog: Catalog | None = None
        self._kept: dict[Any, Meaning] = {}
        self._lock = Lock()

    def admit(
        self, spec: Spec, catalog: Catalog | None, request: Any, conversation: Conversation | None = None
    ) -> Spec:
        """Check a spec against the server and its request, put its plan in its place, and keep the KV cache apart.

        Returns:
            The spec with positions instead of the chat messages that it names.

        Raises:
            SpecError: the spec asks for what this server does not have.
        """
        if catalog is None:
            found = "this server was started without saesteer's dictionaries (additional_config.saesteer)"
            fail(KEY, "not_served", f"{found}, so it cannot steer")
        ids = request.prompt_token_ids
        if ids is None or getattr(request, "resumable", False):
            found = "prompts given as embeddings or as streams are not served by this version"
            fail(KEY, "not_served", f"{found}; send text or token ids")
        if conversation is not None and named(spec):
            spec = resolved(spec, catalog, ids, conversation)
        meaning = self.meaning(spec, catalog, len(ids))
        params = request.sampling_params
        limit = None if self.config is None else self.config.max_dose
        measured = spec.returns.dose or limit is not None
        if meaning.readouts:
            self._bound(meaning.readouts, catalog, len(ids), params)
        params.saesteer_report = Report(
            meaning.applied, meaning.sites if measured else None, limit, readouts=meaning.readouts
        )
        params.extra_args = {**(params.extra_args or {}), KEY: meaning.admitted}
        if meaning.first != (None, None):
            params.extra_args[FIRST] = meaning.first
        if meaning.edits:
            refusing = self.config is not None and self.config.max_dose_action == "refuse"
            # A cached token is not measured again, and the request that computed it may be refused for it later.
            params.extra_args[RUNS] = keyed(meaning.runs, self._server, uuid4().hex if refusing else None)
        return spec

    def _bound(self, readouts: Sequence[Reported], catalog: Catalog, prompt_len: int, params: Any) -> None:
        if self._model is None or self.config is None:
            return
        most = params.max_tokens or max(1, self._model.max_model_len - prompt_len)
        size = declared([one.readout for one in readouts], catalog, prompt_len, most, self._model.dtype.itemsize)
        refuse_above(self.config.max_read_mib << 20, size * (params.n or 1))

    def meaning(self, spec: Spec, catalog: Catalog, prompt_len: int) -> Meaning:
        """The meaning of a spec.

        Raises:
            SpecError: it asks for what this server does not have.
        """
        with self._lock:
            found = self._find(spec, catalog, prompt_len)
        if found is None:
            planned = plan(spec, catalog, prompt_len)
            rows = self.fetching.fetch(planned, catalog) if self.fetching else {}
            full = replace(catalog, rows=rows) if rows else catalog
            found = _meaning(spec, full, planned, prompt_len, self._dtype)
            with self._lock:
                self._keep(catalog, (spec, prompt_len) if planned.relative else spec, found)
        elif self.fetching:
            self.fetching.check(found.rows.items())
        return found

    def _find(self, spec: Spec, catalog: Catalog, prompt_len: int) -> Meaning | None:
        for key in (spec, (spec, prompt_len)) if self._catalog is catalog else ():
            found = self._kept.pop(key, None)
            if found is not None:
                self._kept[key] = found  # the most recently used comes last
                return found
        return None

    def _keep(self, catalog: Catalog, key: Any, found: Meaning) -> None:
        if self._catalog is not catalog:
            self._catalog = catalog
            self._kept.clear()
        self._kept[key] = found
        if len(self._kept) > _KNOWN:
            del self._kept[next(iter(self._kept))]


def _meaning(spec: Spec, catalog: Catalog, found: Plan, prompt_len: int, dtype: str) -> Meaning:
    # The ops are only for logs (logs.py).
    admitted = {"edits": [{"op": edit.op} for edit in spec.edits], **encode(found, catalog, dose=spec.returns.dose)}
    edited = runs(found, change_digests(found, catalog))
    rows = features_of(found, catalog) if catalog.rows else {}
    starts = [one.windows[0][0] for one in found.readouts if one.windows]
    first = first_recomputed(found.readouts, prompt_len), min(starts, default=None)
    told = reported(found.readouts, catalog, dtype)
    return Meaning(bool(found), applied(found, catalog), sites_of(found, catalog), edited, admitted, told, first, rows)


def resolved(spec: Spec, catalog: Catalog, ids: list[int], conversation: Conversation) -> Spec:
    """The spec with positions instead of the chat messages that it names.

    Raises:
        SpecError: there is no such message.
    """
    return resolve(spec, catalog, len(ids), conversation.roles, partial(conversation.spans, ids))


def without_ours(extra_args: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a client may send with its spec: not our own words to the engine, which would key other requests' blocks."""
    if not extra_args or not any(name.startswith(f"{KEY}_") for name in extra_args):
        return extra_args  # type: ignore[return-value]  # it is the dict that vLLM made
    return {name: value for name, value in extra_args.items() if not name.startswith(f"{KEY}_")}


def keyed(found: Sequence[Run], server: str, own: str | None) -> list[list[Any]]:
    """The runs as the engine gets them, with digests that are valid only on this server.

    A digest covers the content behind names, which may be replaced, so requests with the same name may share nothing.

    Args:
        found: the runs of the request's plan.
        server: fingerprint of the dictionaries and limits.
        own: makes the keys unique to one request; None: requests with the same edits share.
    """
    return [[lo, hi, digest([server, own, edits])] for lo, hi, edits in found]
