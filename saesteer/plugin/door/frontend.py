"""The front door: checks specs, refuses wrong ones with 400, and sends on what the others edit. Knows no tensor.

Wraps, each in the process that talks to clients:
    InputProcessor.__init__          reads the catalog of this server
    InputProcessor.process_inputs    checks the spec against it (admission.py)
    AsyncLLM.add_request             finds the chat messages that a spec names, off the event loop
    AsyncLLM.generate                waits for the consumers that a spec names (consuming.py)
    *Request.to_sampling_params      the HTTP body field "saesteer" travels as extra_args, or is refused for audio
    *Request.to_beam_search_params   beam search drops extra_args: refused
    *.get_supported_tasks            handshake with the workers, before the first request
    load_endpoint_plugins            the admin routes (admin.py)
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from dataclasses import replace
from typing import Any

from saesteer import __version__
from saesteer.config.assets import Assets
from saesteer.config.checks import check_modules
from saesteer.config.config import KEY
from saesteer.config.settings import admin_key
from saesteer.consumers.known import Consumers
from saesteer.errors import ConfigError, SpecError, UnsupportedError
from saesteer.language import spec as language
from saesteer.language.fields import varied
from saesteer.language.sites import canonical, expand_sites
from saesteer.models.families import of_layers, other_widths
from saesteer.plugin import contract, stages, unservable
from saesteer.plugin.assets import assets_of, fingerprint
from saesteer.plugin.configured import wire_of
from saesteer.plugin.door import logs
from saesteer.plugin.door.admission import Door, located, needs_messages
from saesteer.plugin.door.conversation import conversation_of, template_of
from saesteer.plugin.door.refusals import refuse_nothing, refuse_steering
from saesteer.plugin.door.rows import Fetching
from saesteer.plugin.http import access, bodies, memory, models, routes
from saesteer.plugin.http.exchange import begun, exchange
from saesteer.plugin.names import versions
from saesteer.plugin.names.board import Board
from saesteer.plugin.names.rpc import ask_workers
from saesteer.plugin.reasoning import has_parser
from saesteer.plugin.results import consuming, metrics
from saesteer.plugin.results.errors import WORDS, SpecRefused
from saesteer.plugin.wrap import Original, around


@around
def _reading_catalog(original: Original, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    assets = assets_of(vllm_config)
    self.saesteer_names, self.saesteer_door = None, Door()
    if assets is not None:
        config, model = assets.config, vllm_config.model_config
        consumers = Consumers.open(config.consumers, config.capture_folder, metrics.consumed)
        self.saesteer_names = _names(assets, vllm_config, consumers)
        capture = expand_sites(config.capture, model.hf_text_config.num_hidden_layers)
        sites = tuple(dict.fromkeys(map(canonical, capture)))
        fetching = Fetching(assets.rows, model.dtype)
        self.saesteer_door = Door(fingerprint(assets), config, fetching, vllm_config, consumers, sites)
    models.serving[:] = [self.saesteer_names] if self.saesteer_names else []
    original(self, vllm_config, *args, **kwargs)


def _names(assets: Assets, vllm_config: Any, consumers: Consumers | None = None) -> versions.Names:
    model, board = vllm_config.model_config, _board(vllm_config.parallel_config)
    layers, others = model.hf_text_config.num_hidden_layers, other_widths(model.hf_text_config)
    assets.refuse_others(model.model)
    assets.refuse_unlike(model.hf_text_config)
    begins, width = stages.begins(vllm_config), model.get_hidden_size()
    catalog = assets.catalog(width=width, layers=layers, other_widths=others, model=model.model, stages=begins)
    checks = {name: one.check for name, one in consumers.named.items()} if consumers else {}
    parts = has_parser(vllm_config)
    catalog = replace(catalog, consumers=checks, parts=parts, **of_layers(model.hf_text_config))
    check_modules(catalog)
    for info in assets.infos.values():
        catalog.largest(info, 0)  # answers report the values that the workers load, whatever comes to lie there later
    return versions.Names(catalog, pool_rows=assets.config.pool_rows, layers=layers, board=board)


def spec_of(params: Any) -> language.Spec | None:
    """The spec in a request's ``extra_args``, parsed, with the module that the model of its body names.

    Raises:
        SpecError: it is wrong.
    """
    extra = getattr(params, "extra_args", None) or {}
    spec = language.from_json(extra[KEY]) if KEY in extra else None
    found = exchange()
    return spec if found is None or found.module is None else varied(spec or language.Spec(), model=found.module)


def with_spec(params: Any, spec: language.Spec | None) -> Any:
    """Parameters that carry a parsed spec, which vLLM's deep copies of them leave as it is; the given ones stay."""
    if spec is None:
        return params
    found = copy(params)
    found.extra_args = {**(params.extra_args or {}), KEY: spec}
    return found


@around
def _checking(
    original: Original, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        if not hasattr(self, "saesteer_door"):  # stock vLLM
            if wire_of(getattr(self, "vllm_config", None)) is not None:
                raise UnsupportedError("the engine's settings were not read: EngineArgs did not make its config")
            if KEY in (getattr(params, "extra_args", None) or ()):
                refuse_steering()
            return original(self, request_id, prompt, params, *args, **kwargs)
        spec = spec_of(params)
        request = original(self, request_id, prompt, with_spec(params, spec), *args, **kwargs)
        taken = request.sampling_params
        names, door = self.saesteer_names, self.saesteer_door
        if names is not None:
            bodies.refuse_near(getattr(params, "extra_args", None), "extra_args")
        held = None if names is None else names.hold()
        catalog = None if held is None else held.catalog
        if taken is not None:
            refuse_nothing(door.config, spec)
        silent = spec is None and (catalog is None or catalog.default is None)
        if spec is None and taken is not None and (not silent or door.captures(request)):
            spec = language.Spec()
        if spec is not None:
            about: dict[str, Any] = {"template": template_of(prompt), "silent": silent}
            spec = door.admit(spec, catalog, request, conversation_of(prompt), **about)
            if not silent and (found := exchange()) is not None:
                found.mark = taken.saesteer_mark
            if held is not None:
                names.count(held, spec)
    except SpecError as error:
        raise SpecRefused(error) from None
    return request


@around
async def _asking_ahead(
    original: Original, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Find messages in a thread: a long conversation is rendered many times, while other requests wait for tokens.

    The rows of dictionaries in files are read there, too, and the tokens found that end a part of the answer.
    """
    known = self.input_processor.saesteer_names
    conversation, catalog = conversation_of(prompt), None if known is None else known.catalog
    try:
        spec = spec_of(params)
        if spec is not None and catalog is not None:
            if conversation is not None and needs_messages(spec):
                await asyncio.to_thread(located, spec, catalog, prompt["prompt_token_ids"], conversation)
            if fetching := self.input_processor.saesteer_door.fetching:
                with suppress(SpecError):  # vLLM's own checks come first
                    await asyncio.to_thread(fetching.prepare, spec, catalog)
        if catalog is not None and catalog.parts and (spec is not None or catalog.default):
            prepare, asked = self.input_processor.saesteer_door.borders.prepare, spec or language.Spec()
            ids = () if conversation is None else prompt["prompt_token_ids"]
            await asyncio.to_thread(prepare, asked, catalog, ids, conversation, template_of(prompt))
    except SpecError as error:
        raise SpecRefused(error) from None
    params = with_spec(params, spec)
    await consuming.room(self.input_processor.saesteer_door.consumers, params)
    queue = await original(self, request_id, prompt, params, *args, **kwargs)
    if (found := exchange()) is not None:
        config = self.input_processor.saesteer_door.config
        found.admit(at_once=config is None or not (config.max_dose_action == "refuse" or config.fail_fast))
    return queue


@around
def _settling(original: Original, self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
    outputs, found = original(self, prompt, sampling_params, *args, **kwargs), exchange()
    outputs = _settled(outputs) if consuming.are_named(sampling_params) else outputs
    return outputs if found is None else found.watch(outputs, getattr(sampling_params, "n", None) or 1)


async def _settled(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Outputs of a request that names consumers; the last ones wait for these."""
    async with aclosing(outputs):
        async for output in outputs:
            try:
                await consuming.settled(output)
            except SpecError as error:
                raise SpecRefused(error) from None
            yield output


@around
def _adding_admin_routes(original: Original, *args: Any, **kwargs: Any) -> Any:
    from saesteer.plugin.http.admin import EndpointPlugin  # FastAPI is imported only where HTTP is answered

    return [*original(*args, **kwargs), EndpointPlugin()]


def _board(parallel: Any) -> Board | None:
    """What several API servers share if names may change; servers without a common engine would miss a change."""
    if not admin_key():
        return None
    if parallel.local_engines_only:
        raise unservable.OWN_ENGINES.error()
    servers = getattr(parallel, "_api_process_count", 1)
    return None if servers == 1 else Board.of(parallel._api_process_rank, servers)


def _refuse_misplaced(request: Any) -> None:
    if models.serving:  # elsewhere, such a field may be of another plugin
        bodies.refuse_misplaced(request)


@around
def _forwarding_body_field(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    params = original(self, *args, **kwargs)
    body = self.model_extra or {}
    _refuse_misplaced(self)
    if body.get(KEY) is not None:
        if KEY in (params.extra_args or {}):
            message = "appears both in the body and in vllm_xargs; expected only one of them"
            raise SpecRefused(SpecError(message, field=KEY, code="conflict"))
        params.extra_args = {**(params.extra_args or {}), KEY: body[KEY]}
    if bodies.is_steered(self) or models.has_default():
        begun().asked += 1
    return params


@around
def _refusing_body_field(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_misplaced(self)
    if bodies.is_steered(self):
        raise routes.refused(routes.unserved("routes of audio"))
    return original(self, *args, **kwargs)


@around
def _refusing_beam_search(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_misplaced(self)
    if bodies.is_steered(self) or models.has_default():
        raise SpecRefused(SpecError(unservable.NO_BEAMS, field=KEY, code="not_served"))
    return original(self, *args, **kwargs)


@around
def _refusing_beam_search_offline(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    names = self.llm_engine.input_processor.saesteer_names
    if names is not None and names.catalog.default:
        raise SpecError(unservable.NO_BEAMS, field=KEY, code="not_served")
    return original(self, *args, **kwargs)


def _agree(assets: Assets, statuses: list[Any]) -> None:
    expected = {"version": __version__, "fingerprint": fingerprint(assets)}
    for status in statuses:
        if status != expected:
            raise ConfigError(f"a worker runs another saesteer or other dictionaries: {status}, expected {expected}")


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        raise ConfigError(f"a worker does not answer saesteer's handshake, so it would not steer: {exc}") from exc


@around
def _shaking_hands(original: Original, self: Any) -> Any:
    tasks = original(self)
    # LLM calls this for every request, so it does not read again what is settled.
    assets = None if getattr(self, "saesteer_agreed", False) else assets_of(self.vllm_config)
    if assets is not None:
        contract.install("offline")  # here LLM has been imported, if it is used at all
        with _answered():
            statuses = self.collective_rpc("saesteer_status")
        _agree(assets, statuses)
        self.saesteer_agreed = True
    return tasks


@around
async def _shaking_hands_async(original: Original, self: Any) -> Any:
    tasks = await original(self)
    assets = None if getattr(self, "saesteer_agreed", False) else assets_of(self.vllm_config)
    if assets is not None:
        contract.install("http")  # whoever calls this answers over HTTP
        metrics.install((*WORDS, consuming.FAILED, memory.CODE, access.WRONG_KEY))
        logs.filter_streams()
        metrics.pools(self.input_processor.saesteer_names.usage())
        with _answered():
            statuses = await ask_workers(self, "saesteer_status")
        _agree(assets, statuses)
        self.saesteer_agreed = True
    return tasks
