"""``saesteer.LLM``: vLLM's offline engine, with dictionaries at start and a spec for each prompt."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import vllm

from saesteer import plugin
from saesteer.config.config import KEY, OPTIONS, DoseAction, SaesteerConfig
from saesteer.errors import PromptsFailed, UnsupportedError
from saesteer.language.fields import fail
from saesteer.language.spec import Spec, Steer, as_spec
from saesteer.plugin import assets
from saesteer.plugin.configured import disabled
from saesteer.plugin.door import frontend


class LLM(vllm.LLM):
    """vLLM's ``LLM``, whose requests may edit with the given dictionaries, vectors and modules.

    Args:
        model: as vLLM takes it.
        dictionaries: name → path or hub id, with ``@site`` when the files do not say where they belong, or
            ``{"path": ..., "site": ..., "rows": ...}``; ``rows:`` in front of the path leaves it in its file.
        sites: more sites to instrument than those of the dictionaries and vectors; ``resid_post.all`` is every layer.
        reads: sites whose tensors requests may read, in addition to those where dictionaries read.
        consumers: name → options of consumers that requests may name.
        capture: sites whose rows of every request's tokens are written to ``capture_folder``.
        capture_folder: a folder for shards of those rows.
        max_read_mib: MiB that one request may read into its answer; by handle four times as much.
        max_edits: table entries that one request may use.
        vectors: name → file of directions, or ``{"path": ..., "bias": ...}`` for a probe.
        modules: name → file of a spec, or the spec.
        inline_rows: inline vectors, and features of dictionaries by rows, that one request may bring for each site.
        max_results_mib: MiB of all results that are kept to be fetched by a handle, whose ``numbers()`` fetches them.
        result_seconds: seconds that each of them is kept.
        dictionary_folder: a folder; every dictionary below it is served by rows, under its path there.
        dictionaries_of: models whose dictionaries fit this one, where its name does not say it.
        default_module: a module that steers everything, unless a spec has ``"defaults": False``.
        require: "default" refuses ``"defaults": False``, "spec" refuses prompts without a spec that asks for something.
        max_dose: how much edits may change a token at a site, in lengths of the stream there; None: no limit.
        max_dose_action: what to do with a larger change: ``clamp``, the default, scales it down to ``max_dose``;
            ``refuse`` ends its request with an error.
        fail_fast: end a request with an error once its hidden states or logits are not finite, or its answer repeats
            itself.
        fail_fast_after: tokens of repetition, with a period of up to 16 tokens, after which ``fail_fast`` does so.
        **kwargs: anything else that ``vllm.LLM`` takes.

    Raises:
        ConfigError: a dictionary, vector, module or site that this model or version cannot serve, or a wrong limit.
        UnsupportedError: vLLM did not load saesteer's plugin (VLLM_PLUGINS), or an engine option that cannot be served.
        LoadError: a file is invalid.
    """

    def __init__(
        self,
        model: str,
        *,
        dictionaries: Mapping[str, Any] | None = None,
        sites: Sequence[str] = (),
        reads: Sequence[str] = (),
        consumers: Mapping[str, Any] | None = None,
        capture: Sequence[str] = (),
        capture_folder: str | None = None,
        max_read_mib: int = 64,
        max_edits: int = 64,
        vectors: Mapping[str, Any] | None = None,
        modules: Mapping[str, Any] | None = None,
        inline_rows: int = 1,
        max_results_mib: int = 8192,
        result_seconds: int = 3600,
        dictionary_folder: str | None = None,
        dictionaries_of: Sequence[str] = (),
        default_module: str | None = None,
        require: Sequence[str] = (),
        max_dose: float | None = None,
        max_dose_action: DoseAction | None = None,
        fail_fast: bool = False,
        fail_fast_after: int = 16,
        **kwargs: Any,
    ) -> None:
        # The arguments have the names of the options; None stands for an option's default.
        own = {name: value for name, value in locals().items() if name in OPTIONS and value is not None}
        plugin.require()
        wire = SaesteerConfig.from_json(own).to_json()
        assets.opened.cache_clear()  # files may have changed since the last LLM
        assets.opened(json.dumps(wire))
        additional = {**(kwargs.pop("additional_config", None) or {}), KEY: wire}
        super().__init__(model=model, additional_config=additional, **kwargs)
        if not getattr(self.llm_engine, "saesteer_agreed", False) and not disabled():
            raise UnsupportedError("the engine started without saesteer's handshake, so nothing would be steered")

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, steer: Steer | Sequence[Steer] = None, **kwargs: Any
    ) -> list[vllm.RequestOutput]:
        """vLLM's ``generate``; ``steer`` is one spec for all prompts, or one (or None) for each.

        A spec is a dict as in HTTP, a ``Spec``, or an edit or list of edits from ``saesteer.clamp`` and its
        kin, which may also make the edits in a dict: ``{"edits": [saesteer.clamp(...)], "return": {"dose": True}}``.

        Raises:
            PromptsFailed: some prompts failed while they ran: a consumer raised, or the disk was full. The message
                names them, ``errors`` has each error by its prompt's index, and ``outputs`` has all outputs in order,
                None for those that failed. The others' handles can be fetched.
            SpecError: a spec is wrong; nothing has been generated.
        """
        several = isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], int))  # token ids
        params = self._steered(sampling_params, steer, len(prompts) if several else 1)
        return super().generate(prompts, params, **kwargs)

    def chat(
        self, messages: Any, sampling_params: Any = None, *, steer: Steer | Sequence[Steer] = None, **kwargs: Any
    ) -> list[vllm.RequestOutput]:
        """vLLM's ``chat``; ``steer`` as in ``generate``, one for each conversation.

        Raises:
            PromptsFailed: some conversations failed while they ran, as in ``generate``.
            SpecError: a spec is wrong; nothing has been generated.
        """
        several = bool(messages) and isinstance(messages[0], list | tuple)
        params = self._steered(sampling_params, steer, len(messages) if several else 1)
        return super().chat(messages, params, **kwargs)

    def _run_engine(self, *args: Any, **kwargs: Any) -> Any:
        try:
            outputs = super()._run_engine(*args, **kwargs)
        except PromptsFailed as failed:
            _report(failed.outputs)
            raise
        _report(outputs)
        return outputs

    def _steered(self, params: Any, steer: Any, prompts: int) -> Any:
        if steer is None:
            return params
        specs = [*map(as_spec, steer)] if _is_list_of_specs(steer) else [as_spec(steer)] * prompts
        if len(specs) != prompts:
            raise ValueError(
                f"steer has {len(specs)} specs for {prompts} prompts, expected one for all or one for each"
            )
        params = self.get_default_sampling_params() if params is None else params
        each = list(params) if isinstance(params, list | tuple) else [params] * prompts
        if len(each) != prompts:
            raise ValueError(f"sampling_params has {len(each)} entries for {prompts} prompts")
        if any(spec is not None and KEY in (one.extra_args or ()) for one, spec in zip(each, specs, strict=True)):
            fail("steer", "conflict", f"stands beside {KEY!r} in sampling_params.extra_args, expected one of them")
        steered = [frontend.with_spec(one, spec) for one, spec in zip(each, specs, strict=True)]
        return steered if prompts != 1 or isinstance(params, list | tuple) else steered[0]


def _report(outputs: Iterable[Any]) -> None:
    """Give each steered output the ``saesteer = {"applied": [...], ...}`` of its first completion."""
    for output in outputs:
        said = getattr(output.outputs[0], KEY, None) if isinstance(output, vllm.RequestOutput) else None
        if said is not None:
            output.saesteer = said


def _is_list_of_specs(steer: Any) -> bool:
    """A list of edits is one spec; a list that holds specs, dicts with edits, None or lists is one for each prompt."""
    if not isinstance(steer, list | tuple):
        return False
    return any(
        one is None or isinstance(one, Spec | list | tuple) or (isinstance(one, Mapping) and "op" not in one)
        for one in steer
    )
