"""What a request becomes before the engine takes it: its spec checked against the server, its KV cache kept apart.

Knows plans and fingerprints, and of vLLM the fields of a request. Who calls it is in frontend.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any
from uuid import uuid4

from saesteer.applied import applied
from saesteer.config import KEY, SaesteerConfig
from saesteer.dose import sites_of
from saesteer.errors import SpecError
from saesteer.identity import content_of, digest
from saesteer.messages import named, resolve
from saesteer.plan import Catalog, Plan, plan
from saesteer.plugin import counts
from saesteer.plugin.conversation import Conversation
from saesteer.spec import Spec

# Beside the spec in extra_args, for the worker: where it is equal, table rows are, with the same version of the names.
SAME = f"{KEY}_same"
_KNOWN = 64  # specs; with a vector for every layer of a 27B model one holds 0.7 MB


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a spec does to prompts of one length, or of any length if none of its scopes counts from the prompt."""

    edits: bool  # anything at all
    applied: Sequence[Mapping[str, Any]]  # what an answer says, without counts
    sites: tuple[str, ...]  # whose doses are measured
    content: str  # digest of its edits, by content
    same: str  # what SAME will be


class Known:
    """The meanings of specs that came lately: a module or a set of vectors is mostly asked for more than once.

    Safe to use in threads. A new catalog begins anew, since names stand for something else there.
    """

    def __init__(self) -> None:
        self._catalog: Catalog | None = None
        self._kept: dict[Any, Meaning] = {}
        self._lock = Lock()

    def meaning(self, spec: Spec, catalog: Catalog, prompt_len: int) -> Meaning:
        """That of a spec.

        Raises:
            SpecError: it asks for what this server does not have.
        """
        with self._lock:
            if self._catalog is not catalog:
                self._catalog = catalog
                self._kept.clear()
            for key in (spec, (spec, prompt_len)):
                found = self._kept.pop(key, None)
                if found is not None:
                    break
            else:
                planned = plan(spec, catalog, prompt_len)
                found = _meaning(spec, catalog, planned)
                key = (spec, prompt_len) if planned.relative else spec
            self._kept[key] = found  # the last used stands last
            if len(self._kept) > _KNOWN:
                del self._kept[next(iter(self._kept))]
            return found


def _meaning(spec: Spec, catalog: Catalog, found: Plan) -> Meaning:
    content = digest(content_of(spec.edits, catalog))
    windows = {(change.field, change.windows) for group in found.groups for change in group.changes}
    same = digest([content, sorted(windows), spec.returns.to_json()])
    return Meaning(bool(found), applied(found, catalog), sites_of(found), content, same)


def resolved(spec: Spec, catalog: Catalog, ids: list[int], conversation: Conversation) -> Spec:
    """The spec with positions in the place of the chat messages that it names.

    Raises:
        SpecError: there is no such message.
    """
    return resolve(spec, catalog, len(ids), conversation.roles, partial(conversation.spans, ids))


def admit(
    spec: Spec,
    catalog: Catalog | None,
    server: str,
    request: Any,
    conversation: Conversation | None = None,
    config: SaesteerConfig | None = None,
    known: Known | None = None,
) -> Spec:
    """Check a spec against the server and its request, and keep the request's KV cache apart.

    Returns:
        What the engine gets: the spec with positions in the place of the chat messages that it names.

    Raises:
        SpecError: the spec asks for what this server does not have.
    """
    if catalog is None:
        message = (
            "this server was started without saesteer's dictionaries (additional_config.saesteer), so it cannot steer"
        )
        raise SpecError(message, field="saesteer", code="not_served")
    ids = request.prompt_token_ids
    if ids is None or getattr(request, "resumable", False):
        message = "prompts given as embeddings or as streams are not served by this version; send text or token ids"
        raise SpecError(message, field="saesteer", code="not_served")
    params = request.sampling_params
    if conversation is not None and named(spec):
        spec = resolved(spec, catalog, ids, conversation)
        params.extra_args = {**params.extra_args, KEY: spec.to_json()}
    elif not _travels(params.extra_args[KEY]):
        params.extra_args = {**params.extra_args, KEY: spec.to_json()}
    found = (known or Known()).meaning(spec, catalog, len(ids))
    limit = None if config is None else config.max_dose
    measured = spec.returns.dose or limit is not None
    counts.expect(params, found.applied, found.sites if measured else None, limit)
    if found.edits:
        request.cache_salt = cache_salt(request.cache_salt, server, found.content)
        if config is not None and config.max_dose_action == "refuse":
            # A cached token is not measured again, and who computed it may be refused for it a moment later.
            request.cache_salt = digest([request.cache_salt, uuid4().hex])
    # Always, as the request may have brought one of its own.
    params.extra_args = {**params.extra_args, SAME: found.same}
    return spec


def _travels(wire: Any) -> bool:
    """Whether the engine's messages take a right spec as it was written: 2**64 is a number, msgpack's integers end."""
    if isinstance(wire, int):
        return -(2**63) <= wire < 2**64
    parts = wire.values() if isinstance(wire, Mapping) else wire if isinstance(wire, list | tuple) else ()
    return all(map(_travels, parts))


def cache_salt(tenant: str | None, server: str, content: str) -> str:
    """Hex salt of the prefix cache for requests with these edits: what is not steered alike shares no KV block.

    It is over the content behind names, which may be replaced, so requests with the same name may share nothing.

    Args:
        tenant: the request's own salt.
        server: fingerprint of the dictionaries, since a KV store may outlive a server.
        content: digest of what the request's edits do, as identity.content_of has it.
    """
    return digest([tenant, server, content])
