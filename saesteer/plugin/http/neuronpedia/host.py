"""The engine behind Neuronpedia's routes: prompts as tokens, answers of the model, what it reads. Knows no shape."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind

from saesteer.config.config import KEY
from saesteer.config.decoders import Decoders, nearest
from saesteer.dictionaries.coder import CoderInfo
from saesteer.errors import LoadError, SpecError
from saesteer.language.fields import fail
from saesteer.planning.lookup import check_feature, without_path
from saesteer.planning.plan import Catalog
from saesteer.plugin.door.rows import Fetching
from saesteer.plugin.http.neuronpedia.meaning import Json, Place, Prompt, check_finite

P = ParamSpec("P")
T = TypeVar("T")
_MOST_WAITING = 8  # requests that wait until a whole file may be read


class Busy(Exception):
    """Too many requests wait already; the message says for what."""


class Turns:
    """Whole files are read one after the other: a dictionary takes as much memory as its file."""

    def __init__(self) -> None:
        self._lock, self._waiting = asyncio.Lock(), 0

    async def alone(self, made: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What reads a whole file, in a thread, once no other does. A request that ends while it waits reads nothing.

        Raises:
            Busy: so many wait already.
            SpecError: the file cannot be read.
        """
        if self._waiting >= _MOST_WAITING:
            raise Busy(f"{self._waiting} requests wait to read the whole file of a dictionary; send it again later")
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        # A request may be cancelled, but its thread goes on: the lock is held until that has ended.
        work = asyncio.ensure_future(in_thread(made, *args, **kwargs))
        work.add_done_callback(lambda _: self._lock.release())
        return await asyncio.shield(work)


class Host(NamedTuple):
    """One server, as a request finds it."""

    engine: Any  # vLLM's client of its engine
    catalog: Catalog
    template: str | None  # the operator's chat template: a file or the text itself
    fetching: Fetching | None  # dictionaries that are served by rows
    decoders: Decoders  # of the others
    turns: Turns  # of whole files

    @property
    def model(self) -> Any:
        """vLLM's facts about the model."""
        return self.engine.model_config

    @property
    def longest(self) -> int:
        """How many tokens a prompt and its answer may have."""
        found: int = self.model.max_model_len
        return found

    def check_texts(self, texts: Sequence[str], at: str = "prompt") -> None:
        """Looks at texts before anything is made of them: a tokenizer takes 270 bytes for each character.

        Args:
            texts: of one request.
            at: the field of all of them.

        Raises:
            SpecError: together they have more characters than the longest prompt can have, or one is no text.
        """
        size, most = sum(map(len, texts)), self.longest * self.engine.get_tokenizer().max_chars_per_token
        if size > most:
            message = f"has {size} characters, expected at most {most}: {self.longest} tokens cannot have more"
            fail(at, "too_many", message)
        try:
            for text in texts:
                text.encode()
        except UnicodeEncodeError:
            fail(at, "out_of_range", "has half of a surrogate pair, expected text that UTF-8 can hold")

    async def prompt(self, text: str, *, bos: bool = True) -> Prompt:
        """A text as tokens.

        Args:
            text: as it is; names of special tokens in it become those tokens.
            bos: whether a BOS token comes first, if the tokenizer has one and the text does not begin with it.

        Raises:
            SpecError: it is too long, or no text.
        """
        self.check_texts([text])
        word = self.engine.get_tokenizer().bos_token
        put = bos and word and not text.startswith(word)
        return await asyncio.to_thread(self._tokens, word + text if put else text)

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """A chat as the model's template writes it, with the opening of an answer.

        Raises:
            SpecError: the model has no template, the template refuses the messages, or they are too long or no text.
        """
        self.check_texts([one["content"] for one in messages])
        return await asyncio.to_thread(self._chat, messages)

    def plain(self, ids: Sequence[int]) -> str:
        """Tokens as text, without special ones."""
        found: str = self.engine.get_tokenizer().decode([*ids], skip_special_tokens=True)
        return found

    def _chat(self, messages: Sequence[Mapping[str, str]]) -> Prompt:
        tokenizer, template = self.engine.get_tokenizer(), self.template
        if template is not None and os.path.isfile(template):
            template = Path(template).read_text()
        if template is None and not getattr(tokenizer, "chat_template", None):
            fail("prompt", "not_served", "is a chat, but the model has no chat template; expected /v1/steer/completion")
        options: Json = {} if template is None else {"chat_template": template}
        try:
            text = tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True, **options)
        except Exception as exc:  # templates may raise anything
            message = f"is refused by the chat template ({str(exc)[:200]}), expected messages that it takes"
            raise SpecError(message, field="prompt", code="not_served") from exc
        self.check_texts([text])
        return self._tokens(text)

    def _tokens(self, text: str) -> Prompt:
        tokenizer = self.engine.get_tokenizer()
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            fail("prompt", "empty_scope", "has no token, expected some text")
        if len(ids) > self.longest:
            fail("prompt", "too_many", f"has {len(ids)} tokens, expected at most {self.longest}")
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(one for one, token in added.items() if token.special)}
        tokens = tuple(tokenizer.decode([one]) for one in ids)
        return Prompt(text, (*ids,), tokens, tuple(one in special for one in ids), tokenizer.bos_token_id)

    async def generate(
        self, prompt: Prompt, spec: Json, *, stream: bool = False, **sampling: Any
    ) -> AsyncGenerator[Any, None]:
        """What the engine says of one answer, each time all of it so far; without ``stream``, only at its end.

        Raises:
            SpecError: the request is refused, or fails.
        """
        kind = RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY
        try:
            params = SamplingParams(output_kind=kind, extra_args={KEY: spec}, **sampling)
            asked = {"type": "token", "prompt_token_ids": [*prompt.ids]}
            async with aclosing(self.engine.generate(asked, params, f"neuronpedia-{uuid4().hex}")) as outputs:
                async for output in outputs:
                    yield output.outputs[0]
        except SpecError:
            raise
        except (ValueError, VLLMValidationError) as exc:  # vLLM's own checks
            raise SpecError(str(exc), field="request", code="out_of_range") from exc

    async def read(self, prompt: Prompt, what: Json) -> Json:
        """What an unsteered pass over a prompt reads.

        Args:
            prompt: its last token is an input as well.
            what: a spec's ``return``.

        Raises:
            SpecError: the request is refused, or fails.
        """
        spec = {"defaults": False, "return": what}
        [choice] = [one async for one in self.generate(prompt, spec, max_tokens=1, temperature=0.0, detokenize=False)]
        report: Json = getattr(choice, KEY)
        return report

    async def features(self, prompt: Prompt, reads: Mapping[Place, Json]) -> dict[Place, list[Json]]:
        """The rows that reads of dictionaries find, by dictionary, in the order of their positions.

        Raises:
            SpecError: the request is refused, or fails.
        """
        report = await self.read(prompt, {"features": [{**place.fields, **one} for place, one in reads.items()]})
        rows: dict[Place, list[Json]] = {}
        for place in reads:
            entries = [
                one for one in report["features"] if self.catalog.key(one["dictionary"], one.get("layer")) == place.key
            ]
            rows[place] = [row for entry in entries for row in entry["rows"]]
            for row in rows[place]:
                values = [*row.get("features", {}).values(), *(value for _, value in row.get("top", ()))]
                check_finite(values, f"features of {place.source} at token {row['position']}")
        return rows

    async def rows_of(self, place: Place, named: Mapping[str, int]) -> list[NDArray[np.float32]]:
        """The decoder rows of features, [d] each.

        Args:
            place: their dictionary.
            named: their numbers, by where the request names them.

        Raises:
            SpecError: there is no such feature, it writes several rows, or the file has changed or cannot be read.
            Busy: it takes the whole file, for which too many wait.
        """
        info = place.info
        for at, index in named.items():
            if info.targets is not None:
                message = "is of a cross-layer transcoder, whose features have several rows, expected another"
                fail(at, "not_served", message)
            if index < 0:
                fail(f"{at}.index", "out_of_range", f"got {index}, expected the number of a feature")
            check_feature(place.source, info, index, f"{at}.index")
        features = [*named.values()]
        if info.by_rows:
            assert self.fetching is not None
            return await in_thread(self.fetching.decoders, place.key, features)
        found = await in_thread(self.decoders.alone, info, features)
        return await self.turns.alone(self.decoders.whole, info, features) if found is None else found

    async def nearest(self, place: Place, vector: NDArray[np.float32], most: int) -> list[tuple[int, float]]:
        """As of ``decoders.nearest``.

        Raises:
            SpecError: the file has changed, or cannot be read.
            Busy: too many wait for a whole file.
        """
        info = place.info
        await self._check(place.key, info)
        found = await self.turns.alone(nearest, info, vector, most)
        await self._check(place.key, info)
        return found

    async def _check(self, key: str, info: CoderInfo) -> None:
        """That the file of a dictionary by rows is the one that was opened; ``decoders`` checks the others."""
        if info.by_rows:
            assert self.fetching is not None
            await in_thread(self.fetching.check_file, key)


async def in_thread(made: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What reads a file, off the event loop.

    Raises:
        SpecError: the file cannot be read.
    """
    try:
        return await asyncio.to_thread(made, *args, **kwargs)
    except LoadError as exc:
        raise SpecError(f"cannot be read: {without_path(exc)}", field="source", code="unreadable") from exc
