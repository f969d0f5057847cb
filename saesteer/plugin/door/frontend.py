"""The front door: checks specs, refuses wrong ones with 400, and sends on what the others edit. Knows no tensor.

Wraps, each in the process that talks to clients:
    InputProcessor.__init__          reads the catalog of this server
    InputProcessor.process_inputs    checks the spec against it (admission.py)
    AsyncLLM.add_request             finds the chat messages that a spec names, off the event loop
    *Request.to_sampling_params      the HTTP body field "saesteer" travels as extra_args
    *Request.to_beam_search_params   beam search drops extra_args: refused
    *.get_supported_tasks            handshake with the workers, before the first request
    load_endpoint_plugins            the admin routes (admin.py)
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import Any

from saesteer import __version__
from saesteer.config.assets import Assets
from saesteer.config.config import ADMIN_KEY, KEY, SaesteerConfig
from saesteer.errors import ConfigError, SpecError, UnsupportedError
from saesteer.language import spec as language
from saesteer.models.families import other_widths
from saesteer.planning.messages import named
from saesteer.plugin import contract
from saesteer.plugin.door import logs
from saesteer.plugin.door.admission import Door, resolved, without_ours
from saesteer.plugin.door.conversation import conversation_of
from saesteer.plugin.door.rows import Fetching
from saesteer.plugin.http import streams
from saesteer.plugin.names import versions
from saesteer.plugin.names.board import Board
from saesteer.plugin.names.rpc import ask_workers
from saesteer.plugin.results import metrics
from saesteer.plugin.results.failures import SpecRefused
from saesteer.plugin.wrap import Original, around


def assets_of(vllm_config: Any) -> Assets | None:
    """What the operator configured, opened once per process; None without saesteer, or with SAESTEER_DISABLE=1."""
    additional = vllm_config.additional_config
    raw = additional.get(KEY) if isinstance(additional, Mapping) else None
    if raw is None or os.environ.get("SAESTEER_DISABLE") == "1":
        return None
    return opened(json.dumps(raw, default=str))


@cache
def opened(wire: str) -> Assets:
    """The assets of a wire form, as JSON."""
    return Assets.open(SaesteerConfig.from_json(json.loads(wire)))


def fingerprint(assets: Assets) -> str:
    """Digest of saesteer's version and of everything that its graphs and caches depend on."""
    return hashlib.sha256((__version__ + assets.fingerprint).encode()).hexdigest()


# A beam is another request for each token, whose prompt is all of the last one.
_NO_BEAMS = "beam search cannot be steered; expected sampling, on a server without a default module"
_default: set[str] = set()  # the default module of this process's server, for what does not know the server


@around
def _salting_compile_cache(original: Original, self: Any, *args: Any, **kwargs: Any) -> str:
    stock = original(self, *args, **kwargs)
    assets = assets_of(self)
    if assets is None:
        return stock
    return hashlib.sha256((stock + fingerprint(assets)).encode()).hexdigest()[: len(stock)]


@around
def _reading_catalog(original: Original, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    assets = assets_of(vllm_config)
    if assets is not None:
        refuse_unservable(vllm_config)
    self.saesteer_names = None if assets is None else _names(assets, vllm_config)
    fetching = None if assets is None else Fetching(assets.rows, vllm_config.model_config.dtype)
    self.saesteer_door = Door()
    if assets is not None:
        self.saesteer_door = Door(fingerprint(assets), assets.config, fetching, vllm_config.model_config)
    _default.clear()
    if self.saesteer_door.default:
        _default.add(self.saesteer_door.default)
    original(self, vllm_config, *args, **kwargs)


def _names(assets: Assets, vllm_config: Any) -> versions.Names:
    model, board = vllm_config.model_config, _board(vllm_config.parallel_config)
    layers, others = model.hf_text_config.num_hidden_layers, other_widths(model.hf_text_config)
    catalog = assets.catalog(width=model.get_hidden_size(), layers=layers, other_widths=others)
    return versions.Names(catalog, pool_rows=assets.config.pool_rows, layers=layers, board=board)


def refuse_unservable(vllm_config: Any) -> None:
    """Refuse engine options under which an edit would be lost or land on the wrong token.

    Raises:
        UnsupportedError: names the option.
    """
    parallel, passes = vllm_config.parallel_config, vllm_config.compilation_config.pass_config
    model, connector = vllm_config.model_config, getattr(vllm_config, "kv_transfer_config", None)
    refused = {
        # They store blocks under their own keys, most of which cover only token ids: another request would get them.
        f"a KV connector ({getattr(connector, 'kv_connector', None)})": connector is not None,
        f"the {model.runner_type} runner": model.runner_type != "generate",
        "an encoder-decoder model": getattr(model, "is_encoder_decoder", False),
        # It bypasses the worker's method that returns the counts.
        "vLLM's first Ray executor (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0)": _is_first_ray(parallel),
        "micro-batch overlap (use_ubatching)": getattr(parallel, "use_ubatching", False),
        "prefill context parallelism": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "kv_sharing_fast_prefill": getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False),
        "sequence parallelism (pass_config.enable_sp)": getattr(passes, "enable_sp", False),
        "speculative decoding": vllm_config.speculative_config is not None,
        "the Rust front end (VLLM_USE_RUST_FRONTEND)": os.environ.get("VLLM_USE_RUST_FRONTEND", "0") == "1",
    }
    for option, on in refused.items():
        if on:
            raise UnsupportedError(f"saesteer cannot serve with {option} in this version; switch it off")


def _is_first_ray(parallel: Any) -> bool:
    import vllm.envs

    # 0.33 has only the second one, and no such variable.
    second: bool = getattr(vllm.envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    return parallel.distributed_executor_backend == "ray" and not second


def spec_of(params: Any) -> language.Spec | None:
    """The spec in a request's ``extra_args``, parsed.

    Raises:
        SpecError: it is wrong.
    """
    extra = getattr(params, "extra_args", None) or {}
    return language.from_json(extra[KEY]) if KEY in extra else None


@around
def _checking(
    original: Original, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    try:
        spec = spec_of(params)
        request = original(self, request_id, prompt, params, *args, **kwargs)
        taken = request.sampling_params
        if taken is not None:
            taken.extra_args = without_ours(taken.extra_args)
        names, door = self.saesteer_names, self.saesteer_door
        if spec is None and taken is not None and door.default:
            spec = language.Spec()
        if spec is not None:
            held = None if names is None else names.hold()
            spec = door.admit(spec, None if held is None else held.catalog, request, conversation_of(prompt))
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

    The rows of dictionaries in files are read there, too.
    """
    known = self.input_processor.saesteer_names
    conversation, catalog = conversation_of(prompt), None if known is None else known.catalog
    if conversation is not None and catalog is not None and _mentions_messages(params):
        try:
            spec = spec_of(params)
            if spec is not None and named(spec):
                await asyncio.to_thread(resolved, spec, catalog, prompt["prompt_token_ids"], conversation)
        except SpecError as error:
            raise SpecRefused(error) from None
    fetching = self.input_processor.saesteer_door.fetching
    if fetching and catalog is not None:
        with suppress(SpecError):  # vLLM's own checks come first
            if (spec := spec_of(params)) is not None:
                await asyncio.to_thread(fetching.prepare, spec, catalog)
    queue = await original(self, request_id, prompt, params, *args, **kwargs)
    streams.admitted()
    return queue


def _mentions_messages(params: Any) -> bool:
    """Whether a spec is worth parsing before vLLM is ready for it: specs with large vectors rarely are."""
    wire = (getattr(params, "extra_args", None) or {}).get(KEY)
    if not isinstance(wire, Mapping):
        return isinstance(wire, str) and '"messages"' in wire
    wanted = wire.get("return")
    lists = [wire.get("edits"), *(wanted.values() if isinstance(wanted, Mapping) else ())]
    items = chain.from_iterable(one if isinstance(one, list) else [one] for one in lists)
    scopes = (one.get("scope") for one in items if isinstance(one, Mapping))
    return any(isinstance(one, Mapping) and "messages" in one for one in scopes)


@around
def _adding_admin_routes(original: Original, *args: Any, **kwargs: Any) -> Any:
    from saesteer.plugin.http.admin import EndpointPlugin  # FastAPI is imported only where HTTP is answered

    return [*original(*args, **kwargs), EndpointPlugin()]


def _board(parallel: Any) -> Board | None:
    """What several API servers share if names may change; servers without a common engine would miss a change."""
    if not os.environ.get(ADMIN_KEY):
        return None
    if parallel.local_engines_only:
        found = "--saesteer-admin-key cannot be served with external or hybrid load balancing of data parallel engines"
        raise UnsupportedError(f"{found}; expected each API server to reach all of them, or no admin key")
    servers = getattr(parallel, "_api_process_count", 1)
    return None if servers == 1 else Board.of(parallel._api_process_rank, servers)


@around
def _forwarding_body_field(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    params = original(self, *args, **kwargs)
    body = self.model_extra or {}
    if KEY in body:
        if KEY in (params.extra_args or {}):
            message = "appears both in the body and in vllm_xargs; expected only one of them"
            raise SpecRefused(SpecError(message, field=KEY, code="conflict"))
        params.extra_args = {**(params.extra_args or {}), KEY: body[KEY]}
    return params


@around
def _refusing_beam_search(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if KEY in (self.model_extra or {}) or KEY in (self.vllm_xargs or {}) or _default:
        raise SpecRefused(SpecError(_NO_BEAMS, field=KEY, code="not_served"))
    return original(self, *args, **kwargs)


@around
def _refusing_beam_search_offline(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.llm_engine.input_processor.saesteer_door.default:
        raise SpecError(_NO_BEAMS, field=KEY, code="not_served")
    return original(self, *args, **kwargs)


def _agree(assets: Assets, statuses: list[Any]) -> None:
    expected = {"version": __version__, "fingerprint": fingerprint(assets)}
    for status in statuses:
        if status != expected:
            raise ConfigError(f"a worker runs another saesteer or other dictionaries: {status}, expected {expected}")


def _lost(exc: Exception) -> ConfigError:
    return ConfigError(f"a worker does not answer saesteer's handshake, so it would not steer: {exc}")


@around
def _shaking_hands(original: Original, self: Any) -> Any:
    tasks = original(self)
    # LLM calls this for every request, so it does not read again what is settled.
    assets = None if getattr(self, "saesteer_agreed", False) else assets_of(self.vllm_config)
    if assets is not None:
        contract.install("offline")  # here LLM has been imported, if it is used at all
        try:
            statuses = self.collective_rpc("saesteer_status")
        except Exception as exc:
            raise _lost(exc) from exc
        _agree(assets, statuses)
        self.saesteer_agreed = True
    return tasks


@around
async def _shaking_hands_async(original: Original, self: Any) -> Any:
    tasks = await original(self)
    assets = None if getattr(self, "saesteer_agreed", False) else assets_of(self.vllm_config)
    if assets is not None:
        contract.install("http")  # whoever calls this answers over HTTP
        metrics.install()
        logs.filter_streams()
        metrics.pools(self.input_processor.saesteer_names.usage())
        try:
            statuses = await ask_workers(self, "saesteer_status")
        except Exception as exc:
            raise _lost(exc) from exc
        _agree(assets, statuses)
        self.saesteer_agreed = True
    return tasks
