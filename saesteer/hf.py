"""The same specs on a Hugging Face Transformers model, through hooks: for laptops, and the oracle of the parity tests.

It calls the server's ops through the same tables, one sequence at a time. Knows nothing of vLLM.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

from saesteer.errors import ConfigError, needs

with needs():
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

from saesteer.config.assets import Assets
from saesteer.config.checks import check_modules
from saesteer.config.config import LIMITS, OPTIONS, SaesteerConfig
from saesteer.dictionaries.coder import ActiveFeature, CoderInfo, SparseCoder, inputs, strongest
from saesteer.engine import doses
from saesteer.engine.encode import encode
from saesteer.engine.engine import Engine, Row, Site
from saesteer.engine.readouts import Segment
from saesteer.language.fields import fail
from saesteer.language.sites import canonical, parse
from saesteer.language.spec import Spec, as_spec
from saesteer.loaders import load
from saesteer.models.families import find_trunk, of_layers, other_widths
from saesteer.models.tokens import chat_ids, token_ids
from saesteer.planning.answers import Rows, reported
from saesteer.planning.plan import Plan
from saesteer.planning.planner import plan
from saesteer.planning.rules import Watch, flags
from saesteer.planning.windows import refuse_unmet, scopes_of

Prompt = str | Sequence[int] | Tensor | NDArray[np.integer]  # text, or token ids in one dimension

_ROW = 1  # the one sequence has the first row


class Model:
    """A Transformers causal language model whose residual stream can be edited by specs.

    Threads may share it: their passes run one after the other. Several may wrap one module of Transformers, each
    edits its own passes alone. Its hooks stay on that module until ``close``, or to the end of a ``with`` block.

    Args:
        model: a loaded model, or a path or hub id.
        tokenizer: needed for text; loaded with the model when that is a path or hub id.
        dictionaries: name → path or hub id, with ``@site`` if the files do not name their site, or
            ``{"path": ..., "site": ...}``. A place with a dictionary for each layer is a set. A dictionary that a
            server would serve by rows is loaded whole, but for a cross-layer transcoder.
        sites: sites to hook besides those of the dictionaries and vectors; ``resid_post.all`` is every layer.
        reads: sites whose tensors ``read`` may return, besides those where dictionaries read; they are hooked, too.
        max_edits: table entries that one spec may use.
        vectors: name → file of directions, or ``{"path": ..., "bias": ...}`` for a probe.
        modules: name → file of a spec, or the spec.
        dictionaries_of: models whose dictionaries fit this one, where its name does not say it.
        default_module: a module that steers everything, unless a spec has ``"defaults": False``.
        max_dose: how far edits may move a token at a site, in lengths of the stream; more is scaled down. None: any.
        max_tokens: of the longest sequence, answer included; memory is set aside for as many. At most the context.
        dtype: the dtype to load the model in; by default float32.

    Raises:
        ConfigError: a dictionary or site that the model lacks, a module that no request could use, or a wrong limit.
        UnsupportedError: the model's decoder layers belong to no family in ``saesteer.models.families``.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        dictionaries: Mapping[str, Any] | None = None,
        sites: Sequence[str] = (),
        reads: Sequence[str] = (),
        max_edits: int = 64,
        vectors: Mapping[str, Any] | None = None,
        modules: Mapping[str, Any] | None = None,
        dictionaries_of: Sequence[str] = (),
        default_module: str | None = None,
        max_dose: float | None = None,
        max_tokens: int = 4096,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # The arguments have the names of the options; None stands for an option's default.
        wishes = {name: value for name, value in locals().items() if name in OPTIONS and value is not None}
        if isinstance(model, str) or hasattr(model, "__fspath__"):
            import transformers

            tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(model)
            config = transformers.AutoConfig.from_pretrained(model)
            of_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            auto = transformers.AutoModelForCausalLM if of_text else transformers.AutoModelForImageTextToText
            model = auto.from_pretrained(model, dtype=dtype)
        self.model = model.eval()
        self.tokenizer = tokenizer
        trunk, family = find_trunk(model, "transformers")
        self._config = SaesteerConfig.from_json({"inline_rows": LIMITS["inline_rows"][2], **wishes})
        # On one machine with one sequence at a time, dictionaries by rows are loaded whole.
        sources = {name: replace(one, rows=False) for name, one in self._config.dictionaries.items()}
        self._config = replace(self._config, dictionaries=sources)
        text = model.config.get_text_config()
        self._assets = Assets.open(self._config)
        self._assets.refuse_unlike(text)
        self._longest = min(max_tokens, text.max_position_embeddings)
        self._why = "the model's context" if self._longest == text.max_position_embeddings else "max_tokens"
        self.engine = Engine(
            self._assets,
            width=text.hidden_size,
            other_widths=other_widths(text),
            model=model.config.name_or_path or None,
            layers=len(getattr(trunk, family.layers)),
            dtype=model.dtype,
            device=model.device,
            max_rows=1,
            max_tokens=self._longest,
        )
        self.engine.catalog = replace(self.engine.catalog, **of_layers(text))
        check_modules(self.engine.catalog)
        self._coders: dict[str, SparseCoder] = {}
        self._captured: dict[str, Tensor] | None = None
        self._lock = threading.RLock()  # held for a whole pass
        self._thread: int | None = None  # that runs the pass
        self._hooks: list[Any] = []
        self._closed = False
        self._kinds = self._none = np.zeros(len(self.engine.sites), dtype=np.int32)  # of the row
        for site in self.engine.sites.values():
            self._hook(site, *family.find(trunk, "transformers", *parse(site.name)))

    def _hook(self, site: Site, module: Any, side: str) -> None:
        register = module.register_forward_pre_hook if side == "in" else module.register_forward_hook
        self._hooks.append(register(lambda *passed: self._edit(site, passed[-1])))  # its arguments, or what it returns

    def _is_mine(self) -> bool:
        """Return whether the forward pass on this thread is this Model's, since others may run the same module."""
        return self._thread == threading.get_ident()

    def close(self) -> None:
        """Remove the hooks from the module of Transformers, once no pass runs; later passes are refused."""
        with self._lock:
            self._closed = True
            for hook in self._hooks:
                hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _edit(self, site: Site, passed: Any) -> None:
        if not self._is_mine():
            return
        hidden = passed[0] if isinstance(passed, tuple) else passed
        stream: Tensor = hidden.view(-1, hidden.shape[-1])
        if self._captured is not None:
            self._captured[site.name] = stream.clone()
        self.engine.edit(site, stream)

    @contextmanager
    def _steered(
        self, prompt: Prompt, steer: Any, prompt_len: int | None = None, *, reading: bool = False, more: int = 0
    ) -> Iterator[tuple[list[int], Plan, Row | None]]:
        """Steers the forward passes inside it, alone. Gives the tokens, the spec's plan, and its row or None."""
        with self._lock:
            if self._closed or self._thread is not None:
                state = "is closed" if self._closed else "runs a pass on this thread"
                raise ConfigError(f"this Model {state}, expected one pass after the other, before close()")
            ids, spec = self.encode(prompt), as_spec(steer) or Spec()
            if len(ids) + more > self._longest:
                asked = f" and max_tokens {more}" if more else ""
                raise ConfigError(f"got {len(ids)} tokens{asked}, expected at most {self._longest}, {self._why}")
            if not 0 <= (prompt_len := len(ids) if prompt_len is None else prompt_len) <= len(ids):
                raise ConfigError(f"prompt_len: got {prompt_len}, expected 0 to {len(ids)}, the number of tokens")
            planned = plan(spec, self.engine.catalog, prompt_len)
            refuse_unmet(scopes_of(planned), prompt_len, len(ids) + max(0, more - 1))
            if not reading and (taken := (*planned.readouts, *planned.measures)):
                what = "reads values out, which is not served on Transformers but by Model.read"
                fail(taken[0].field, "not_served", f"{what}, expected nothing but dose")
            store, wanted = self._assets.rows, planned.rows(self.engine.catalog)
            rows = {one: store.row(one.dictionary, one.feature, self.engine.dtype, one.target) for one in wanted}
            row = self.engine.make_row(encode(planned, replace(self.engine.catalog, rows=rows), dose=spec.returns.dose))
            self._kinds = self._none if row is None else row.kinds
            self.engine.fill(_ROW, row)
            self._thread = threading.get_ident()
            try:
                yield ids, planned, row
            finally:
                self._thread = None
                self.engine.fill(_ROW, None)
                self.engine.rest()

    def _forward(self, ids: Sequence[int], start: int, cache: Any = None) -> Any:
        device = self.engine.device
        count = torch.tensor([0, len(ids)], dtype=torch.int32, device=device)
        positions = torch.arange(start, start + len(ids), device=device)
        row = torch.tensor([_ROW], dtype=torch.int32, device=device)
        self.engine.positions[: len(ids)] = positions
        self.engine.schedule(row, 0, count, 1, len(ids), self._kinds)
        tokens = torch.tensor([list(ids)], device=device)
        with torch.no_grad():
            return self.model(tokens, position_ids=positions[None], past_key_values=cache, use_cache=cache is not None)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, without a chat template, or of token ids in any form: a list, or a 1-D tensor or array.

        Raises:
            ConfigError: the prompt is text without a tokenizer, or is not a flat list of at least one token id.
        """
        return token_ids(prompt, self.tokenizer, self.model.get_input_embeddings().num_embeddings)

    def chat_ids(self, message: str) -> list[int]:
        """Token ids of one user message in the model's chat template, ready for the answer.

        Raises:
            ConfigError: there is no tokenizer, or it has no chat template.
        """
        return chat_ids(self.tokenizer, message, "pass the text itself, or token ids")

    def logits(self, prompt: Prompt, *, steer: Any = None, prompt_len: int | None = None) -> Tensor:
        """Float32 logits [tokens, vocabulary] of one forward pass over all tokens, teacher-forced.

        Args:
            prompt: text or token ids.
            steer: a spec as ``saesteer.LLM.generate`` takes it.
            prompt_len: where the prompt ends and the generated tokens begin; by default all tokens are prompt.

        Raises:
            SpecError: the spec is wrong.
            ConfigError: as ``encode``; or there are more tokens than the model's ``max_tokens``, or fewer than
                ``prompt_len``.
        """
        with self._steered(prompt, steer, prompt_len) as (ids, *_):
            logits: Tensor = self._forward(ids, 0).logits[0]
        return logits.float()

    def generate(
        self, prompt: Prompt, *, steer: Any = None, max_tokens: int = 64, repetition_penalty: float = 1.0
    ) -> list[int]:
        """Greedy continuation as token ids, without the end token.

        Raises:
            SpecError: the spec is wrong.
            ConfigError: as ``encode``; the prompt and ``max_tokens`` are more than the model's ``max_tokens``; or
                ``max_tokens`` is negative, or ``repetition_penalty`` is not above 0.
        """
        from transformers import DynamicCache

        if max_tokens < 0:
            raise ConfigError(f"max_tokens: got {max_tokens}, expected 0 or more")
        if not 0 < repetition_penalty < math.inf:
            raise ConfigError(f"repetition_penalty: got {repetition_penalty}, expected a number above 0")
        ends = self.model.generation_config.eos_token_id
        stop = set(ends if isinstance(ends, list) else [ends])
        made: list[int] = []
        cache = DynamicCache(config=self.model.config.get_text_config())  # not every layer keeps keys and values
        with self._steered(prompt, steer, more=max_tokens) as (ids, *_):
            fresh = ids
            while len(made) < max_tokens:
                scores = self._forward(fresh, len(ids) + len(made) - len(fresh), cache).logits[0, -1].float()
                seen = torch.tensor(sorted({*ids, *made}), device=scores.device)
                kept = scores[seen]
                scores[seen] = torch.where(kept > 0, kept / repetition_penalty, kept * repetition_penalty)
                token = int(scores.argmax())
                if token in stop:
                    break
                made.append(token)
                fresh = [token]
        return made

    def streams(self, prompt: Prompt, *, steer: Any = None, prompt_len: int | None = None) -> dict[str, Tensor]:
        """The tensor [tokens, d] at each instrumented site, before all that its op adds or edits; z may be wider.

        Arguments and errors are those of ``logits``.
        """
        with self._lock:
            self._captured = {}
            try:
                with self._steered(prompt, steer, prompt_len) as (ids, *_):
                    self._forward(ids, 0)
                return self._captured
            finally:
                self._captured = None

    def doses(self, prompt: Prompt, *, steer: Any, prompt_len: int | None = None) -> list[dict[str, Any]]:
        """How much a spec changes the stream at each site, relative to its length, in one pass over all tokens.

        This is ``dose`` in a server's answer to the same tokens, except for the last token, which is no input there:
        for each site ``{"site", "max", "mean", "tokens"}``, with ``max_dose`` also ``"tokens_limited"``. The spec need
        not ask for it. Arguments and errors are those of ``logits``.
        """
        spec = as_spec(steer) or Spec()
        spec = replace(spec, returns=replace(spec.returns, dose=True))
        with self._steered(prompt, spec, prompt_len) as (ids, planned, row):
            if row is None:
                return []
            self._forward(ids, 0)
            return self._measured(planned, row)

    def _measured(self, planned: Plan, row: Row) -> list[dict[str, Any]]:
        counters = self.engine.counted(_ROW, row.counters).cpu().numpy()
        sites = doses.sites_of(planned, self.engine.catalog)
        return doses.report(counters, row.edits, sites, limited=self._config.max_dose is not None)

    def read(self, prompt: Prompt, *, steer: Any, prompt_len: int | None = None) -> dict[str, list[Any]]:
        """What a spec's ``return`` reads and where its rules fire, in one pass over all tokens, as an answer has it.

        All tokens are inputs, the last one as well: ``"hidden": True`` is the row that its successor is sampled from.
        Arguments and errors are those of ``logits``; what is read in ``{"generated": true}`` begins at ``prompt_len``.
        """
        spec = as_spec(steer) or Spec()
        found: dict[str, list[Any]] = {"dose": []} if spec.returns.dose else {}
        with self._steered(prompt, spec, prompt_len, reading=True) as (ids, planned, row):
            if row is None or not (row.readings or found):
                return found
            for one in (one for one in planned.readouts if not one.inline):
                fail(f"{one.field}.as", "not_served", "got handle, which is not served here, expected inline")
            head, taken = self.model.get_output_embeddings(), list[Tensor]()
            hook = head.register_forward_pre_hook(
                lambda _, args: taken.append(args[0][0]) if self._is_mine() else None  # None: the arguments stay
            )
            try:
                self._forward(ids, 0)
            finally:
                hook.remove()
            brought = self.engine.captures.read([Segment("", row.readings, 0, 0, len(ids))], taken[0])
            found = {"dose": self._measured(planned, row)} if found else {}
        dtype = str(self.model.dtype).removeprefix("torch.")
        rows = Rows(reported(planned.readouts, self.engine.catalog, dtype), found)
        blobs, values = ({}, {}) if brought is None else (brought.blobs([""]), brought.watched())
        rows.add(blobs.get("", ()))
        if planned.rules:
            found["flags"] = flags(Watch(planned.rules).look(values.get("", {}), len(ids)), len(ids))
        rows.tell(len(ids), 1, final=True)
        return found

    def stream(self, prompt: Prompt, site: str, *, steer: Any = None) -> Tensor:
        """The residual stream [tokens, d] at an instrumented site, as ``streams`` returns it.

        Raises:
            ConfigError: the site is not instrumented.
        """
        if (name := canonical(site)) not in self.engine.sites:
            raise ConfigError(f"site {site!r} is not instrumented; known: {', '.join(self.engine.sites)}")
        return self.streams(prompt, steer=steer)[name]

    def layers_of(self, dictionary: str) -> tuple[int | None, ...]:
        """The layers of a set, in ascending order; None alone for a dictionary that is none. Errors as ``info``."""
        if dictionary not in self._config.dictionaries:
            raise ConfigError(f"no dictionary {dictionary!r}; known: {', '.join(self._config.dictionaries)}")
        return self._assets.sets.get(dictionary, (None,))

    def info(self, dictionary: str, layer: int | None = None) -> CoderInfo:
        """What is known about a dictionary, with the sites that it has here; of a set, at a layer.

        Raises:
            ConfigError: no dictionary has this name, or a set has no such layer.
        """
        layers = self.layers_of(dictionary)
        if layer not in layers:
            raise ConfigError(f"dictionary {dictionary!r} at layer {layer}; expected {' or '.join(map(str, layers))}")
        return self._assets.infos[self.engine.catalog.key(dictionary, layer)]

    def coder(self, dictionary: str, layer: int | None = None) -> SparseCoder:
        """The dictionary itself on the model's device, to encode and decode with; arguments and errors as ``info``."""
        info, key = self.info(dictionary, layer), self.engine.catalog.key(dictionary, layer)
        if key not in self._coders:
            coder = load(info.source, dtype=self.model.dtype, site=info.site_in)
            self._coders[key] = coder.to(self.engine.device)
        return self._coders[key]

    def activations(self, prompt: Prompt, dictionary: str, *, layer: int | None = None, steer: Any = None) -> Tensor:
        """Feature activations [tokens, F], float32, in the dictionary's unit; errors as ``coder`` and ``streams``."""
        coder, info = self.coder(dictionary, layer), self.info(dictionary, layer)
        return coder.encode(inputs(info, self.streams(prompt, steer=steer)))

    def features(
        self, prompt: Prompt, dictionary: str, *, layer: int | None = None, top_k: int = 5
    ) -> list[list[ActiveFeature]]:
        """The strongest features of each token, strongest first; position 0, an outlier, is left out.

        Raises:
            ConfigError: as ``activations``, or ``top_k`` is negative.
        """
        ids = self.encode(prompt)
        words = [self.tokenizer.decode([token]) if self.tokenizer else str(token) for token in ids]
        found = self.activations(ids, dictionary, layer=layer)
        return strongest(self.info(dictionary, layer), found, words, top_k)[1:]
