"""A storm: random requests through vLLM's own scheduler, KV manager and output processor, and through all of saesteer.

Only the forward pass of the workers is made up (storm_workers.py). Knows neither what requests ask for
(storm_requests.py) nor what they must be answered (storm_answers.py).
"""

import copy
import gc
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from saesteer.config.assets import Assets
from saesteer.config.config import KEY, SaesteerConfig
from saesteer.consumers import Consumer
from saesteer.consumers.known import Consumers
from saesteer.consumers.runner import Runner
from saesteer.engine.engine import Engine
from saesteer.errors import SpecError
from saesteer.language.spec import from_json
from saesteer.loaders.formats import own
from saesteer.plugin.configured import configure
from saesteer.plugin.door.admission import Door
from saesteer.plugin.results import consuming, kept
from saesteer.plugin.results.gathering import Gathering
from tests.plugin.storm_answers import Truth, judged
from tests.plugin.storm_requests import CLOSES, FIRST, MAX_LEN, SITES, WRONG, Asked, drawn, sampling
from tests.plugin.storm_workers import Span, Worker
from tests.small_world import BIASES, CODERS, KINDS, VECTORS, WIDTH

BLOCK, BATCH, TOKENS = 16, 4, 64  # tokens of a KV block; at most, requests and tokens of a step
REFUSED = "empty_scope", "duplicate", "not_served"  # what the door says of some of the requests


class Mode(NamedTuple):
    """How vLLM runs."""

    v2: bool = False  # which of its runners
    asynchronous: bool = False
    guesses: int = 0  # tokens that a step may guess
    stages: tuple[int, ...] = ()  # where the later stages of a pipeline begin
    window: int = 0  # tokens that the layers of a second group of the KV cache see


class Parser:
    """vLLM's reasoning parser of a model that ends its reasoning with one token."""

    reasoning_end_token_ids = frozenset({CLOSES})

    def is_reasoning_end(self, ids: Any) -> bool:
        return False

    def is_reasoning_end_streaming(self, ids: Any, new: Any) -> bool:
        return CLOSES in new


class Judge(Consumer):
    """It says what it got."""

    def end(self, request: Any) -> Any:
        return judged(request)


class Capturing(Consumer):
    """It keeps what it got, by request and choice, with all tokens."""

    def __init__(self) -> None:
        super().__init__({})
        self.got: dict[tuple[str, int], Any] = {}

    def end(self, request: Any) -> None:
        self.got[request.id, request.choice] = judged(request), [*request.tokens]


class Servers:
    """What storms of one mode share: vLLM's settings and the engines of all stages.

    Args:
        folder: for dictionaries and vectors.
        model: a folder with a config, of which nothing is loaded.
    """

    def __init__(self, folder: Path, model: str) -> None:
        configure()
        kv_cache_utils.init_none_hash(sha256)
        self._model = model
        self._made: dict[Mode, tuple[Any, list[Engine]]] = {}
        names = "jump", "top"
        for name in names:
            own.write(folder / f"{name}.safetensors", CODERS[name])
        np.save(folder / "any.npy", VECTORS["any"][None])
        settings: dict[str, Any] = {"sites": SITES, "reads": SITES, "inline_rows": 2}
        settings["dictionaries"] = {name: f"{folder}/{name}.safetensors@{KINDS[name][3]}" for name in names}
        settings["vectors"] = {"any": {"path": f"{folder}/any.npy", "bias": BIASES["any"]}}
        self.config = SaesteerConfig.from_json(settings)

    def of(self, mode: Mode) -> tuple[Any, list[Engine]]:
        """A copy of vLLM's settings, and the engines."""
        if mode not in self._made:
            size: dict[str, Any] = {"width": WIDTH, "layers": 4, "max_rows": BATCH, "max_tokens": TOKENS}
            size |= {"drafts": mode.guesses, "stages": mode.stages, "dtype": torch.float32}
            engines = []
            for stage in range(1 + len(mode.stages)):
                engine = Engine(Assets.open(self.config), stage=stage, device=torch.device("cpu"), **size)
                engine.catalog = replace(engine.catalog, parts=True, consumers={"judge": lambda given, _: given})
                engines.append(engine)
            self._made[mode] = self._settings(mode), engines
        settings, engines = self._made[mode]
        settings = copy.copy(settings)
        for name in ("scheduler_config", "cache_config"):
            setattr(settings, name, copy.copy(getattr(settings, name)))
        return settings, engines

    def _settings(self, mode: Mode) -> Any:
        guesses: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        more = {"speculative_config": guesses | {"num_speculative_tokens": mode.guesses}} if mode.guesses else {}
        return EngineArgs(
            model=self._model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_LEN,
            max_num_seqs=BATCH,
            block_size=BLOCK,
            enable_prefix_caching=True,
            async_scheduling=mode.asynchronous,
            enforce_eager=True,
            **more,
        ).create_engine_config()


class Storm:
    """One server, a storm of requests on it, and what was seen of interest.

    Args:
        servers: of the module.
        mode: how vLLM runs.
        seed: decides everything else.
        folder: for results that are kept.
    """

    def __init__(self, servers: Servers, mode: Mode, seed: int, folder: Path) -> None:
        self.mode, self.seed, self.draw, self.folder = mode, seed, Random(seed), folder
        settings, engines = servers.of(mode)
        blocks, tokens = self.draw.choice([8, 10, 14, 40]) + 6 * bool(mode.window), self.draw.choice([8, 24, 48])
        limits = settings.scheduler_config
        limits.max_num_batched_tokens = limits.max_num_scheduled_tokens = tokens
        settings.cache_config.num_gpu_blocks = blocks
        self.hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
        cache: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**cache))]
        if mode.window:
            groups.append(KVCacheGroupSpec(["sliding"], SlidingWindowSpec(**cache, sliding_window=mode.window)))
        self.scheduler = (AsyncScheduler if mode.asynchronous else Scheduler)(
            vllm_config=settings,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            structured_output_manager=StructuredOutputManager(settings),
            block_size=BLOCK,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = mode.v2
        self.processor = OutputProcessor(None, log_stats=False)
        self.sites = self.draw.choice([(), (), (FIRST,), SITES])  # that the operator captures
        self.capturing = Capturing()
        runners = (Runner("capturing", self.capturing),) if self.sites else ()
        self.consumers = Consumers({"judge": Runner("judge", Judge({}))}, runners)
        self.catalog = engines[0].catalog
        self.door = Door("server", servers.config, None, settings, self.consumers, self.sites)
        self.door.results = kept.Results(1 << 30, 3600, folder)
        self.asked: dict[str, Asked] = {}
        self.workers = [Worker(engine, v2=mode.v2, asked=self.asked, draw=self.draw) for engine in engines]
        self.sent = self.draw.random() < 0.5  # whether messages are packed, as between processes
        self.guesses: Any = None  # for the next step
        self.seen = Counter[str]()

    def run(self, requests: int = 14) -> Counter[str]:
        """Ask so many requests, assert that each is answered as it must be and that nothing stays; say what happened.

        A failure names the storm and the request in its notes.
        """
        try:
            self._blow(requests)
            self._settle()
        except BaseException as exc:
            exc.add_note(f"in the storm {self.seed} of {self.mode}")
            raise
        return self.seen

    def _blow(self, requests: int) -> None:
        draw, waiting, number = self.draw, list[Any](), 0
        depth = 2 if self.mode.asynchronous or self.mode.stages else 1  # steps that are under way
        for _ in range(4000):
            if number < requests and draw.random() < 0.35 and len(self.scheduler.requests) < 8:
                self._ask(number)
                number += 1
            if draw.random() < 0.03 and self.processor.request_states:
                self._abort(draw.choice(sorted(self.processor.request_states)))
            if draw.random() < 0.01 and depth == 1:
                self.scheduler.reset_prefix_cache(reset_running_requests=True)
            if draw.random() < 0.02:
                self.scheduler.kv_cache_manager.reset_prefix_cache()
            if self.scheduler.has_requests():
                waiting.append(self._step())
            elif not waiting and number == requests:
                return
            while waiting and (len(waiting) >= depth or not self.scheduler.has_requests()):
                self._take(*waiting.pop(0))
                if draw.random() < 0.5:
                    break
        raise AssertionError("the storm does not end")

    def _settle(self) -> None:
        """All have ended; steps without anybody follow, and then nothing is kept for anybody."""
        for _ in range(3):
            self._take(*self._step())
        self.consumers.close()
        for one in self.asked.values():
            assert one.ended or one.aborted, (one, "has no end")
            if self.sites and one.ended and not one.broken:
                self.seen["captured"] += 1
                got, tokens = self.capturing.got[one.outer, one.choice]
                Truth(one).check_captured(got, tokens, self.sites)
        for each in self.workers:
            steering = each.steering
            for name in ("rows", "_places", "_holders", "failed", "_kept", "_cached", "_borders", "_stops"):
                assert not getattr(steering, name), (name, getattr(steering, name))
            assert not steering._sinks._known and not steering._sinks._open
        for name in ("saesteer_read", "saesteer_filed", "saesteer_fired", "saesteer_left"):
            assert not vars(self.scheduler).get(name), (name, vars(self.scheduler)[name])
        assert not self.processor.request_states
        del self.processor
        gc.collect()  # an answer that nobody has any more lets its results go
        files = [path.name for path in self.folder.rglob("*") if path.name not in ("lock", "results")]
        assert not files, ("files stay", files)

    def _ask(self, number: int) -> None:
        choices = drawn(self.draw, self.seed, number, self.mode.guesses)
        first = choices[0]
        request = EngineCoreRequest(
            request_id=first.outer,
            prompt_token_ids=first.ids[: first.prompt],
            mm_features=None,
            sampling_params=sampling(first),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id=first.outer,
        )
        if first.spec is not None:
            try:
                self.door.admit(from_json(first.spec), self.catalog, request)
            except SpecError as exc:
                if exc.code not in REFUSED:
                    raise
                return
            if first.broken:
                request.sampling_params.extra_args[KEY] = {"plan": b"damaged"}
        elif self.sites:
            self.door.admit(from_json({}), self.catalog, request, silent=True)
        parent = ParentRequest(request) if len(choices) > 1 else None
        for one in choices:
            child = request
            if parent is not None:
                child = copy.copy(request)
                child.request_id, child.sampling_params = parent.get_child_info(one.choice)
                assert child.request_id == one.id
            self.asked[one.id] = one
            self.processor.add_request(child, None, parent, one.choice, None)
            if one.stop_string is not None:
                _find_string(self.processor.request_states[one.id].detokenizer, one.stop_string)
            if self.sent:
                extra = pickle.loads(pickle.dumps(child.sampling_params.extra_args))
                child = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(child))
                child.sampling_params.extra_args = extra
            self.scheduler.add_request(Request.from_engine_core_request(child, self.hasher))

    def _abort(self, name: str) -> None:
        outer = self.asked[name].outer
        for one in self.asked.values():
            one.aborted |= one.outer == outer and not one.ended
        self.seen["aborted"] += 1
        self._finish(self.processor.abort_requests([outer], internal=True))

    def _finish(self, names: Any) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def _step(self) -> tuple[Any, Any, dict[str, Span]]:
        """Schedule a step and launch it: what was scheduled, its output, and each request's positions that hold."""
        step = self.scheduler.schedule()
        done = [each.launch(pickle.loads(pickle.dumps(step)) if self.sent else step) for each in self.workers]
        output, spans = done[-1]
        if len(done) > 1 and output is not EMPTY_MODEL_RUNNER_OUTPUT:
            outputs = pickle.loads(pickle.dumps([output for output, _ in done]))
            output = Gathering(1).aggregate(outputs, len(outputs) - 1)
        elif self.sent and not self.mode.asynchronous:
            output = pickle.loads(pickle.dumps(output))
        for name, (_, end) in spans.items():
            self.asked[name].reached = max(self.asked[name].reached, end)
        if self.mode.guesses and spans:
            self.guesses = self._guess(step, output, spans)
        return step, output, spans

    def _guess(self, step: Any, output: Any, spans: dict[str, Span]) -> DraftTokenIds:
        guesses = []
        for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            behind = self.asked[name].ids[spans[name][1] + 1 :] if sampled else []
            some = self.draw.randrange(self.mode.guesses + 1)
            held, tried = len(sampled) - 1, len(step.scheduled_spec_decode_tokens.get(name, ()))
            self.seen.update(["guess held"] * (held > 0) + ["guess rejected"] * (0 <= held < tried))
            guesses.append([token if self.draw.random() < 0.7 else WRONG for token in behind[:some]])
        return DraftTokenIds(output.req_ids, guesses)

    def _take(self, step: Any, output: Any, spans: dict[str, Span]) -> None:
        """What a step has made goes to the scheduler, and from there into answers."""
        running = self.scheduler.requests
        for name, request in running.items():
            self.asked[name].preemptions = request.num_preemptions
        for name, span in spans.items():
            if name in running and not running[name].is_finished():
                self.asked[name].computed |= {*range(*span)}
        for batch in self.scheduler.update_from_output(step, output).values():
            if self.sent:
                batch = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(batch))
            for one in batch.outputs:
                asked = self.asked[one.request_id]
                if one.finish_reason == FinishReason.ERROR and not asked.broken:
                    broken = [other.ids[:BLOCK] for other in self.asked.values() if other.broken]
                    assert asked.ids[:BLOCK] in broken, one
                    asked.broken = True  # it was reading the cache of one that failed
                if one.prefill_stats is not None:
                    asked.cached = one.prefill_stats.num_cached_tokens
                    if asked.cached and not asked.broken:
                        truth = Truth(asked)
                        truth.check_cached(self.asked.values())
                        self.seen.update(truth.events)
            made = self.processor.process_outputs(batch.outputs)
            for answer in made.request_outputs:
                for choice in answer.outputs:
                    self._answer(answer, choice)
            if made.reqs_to_abort:
                self._finish(made.reqs_to_abort)
        if self.mode.guesses and spans:
            self.scheduler.update_draft_token_ids(self.guesses)

    def _answer(self, answer: Any, choice: Any) -> None:
        [one] = [x for x in self.asked.values() if (x.outer, x.choice) == (answer.request_id, choice.index)]
        more = [*choice.token_ids]
        one.tokens = one.tokens + more if one.kind.name == "DELTA" else more
        if choice.finish_reason is None or one.ended:
            return
        one.ended = True
        if one.broken:
            self.seen["broken"] += 1
            return
        fields = getattr(choice, "saesteer", None)
        if fields is not None:
            consuming.settle(SimpleNamespace(outputs=[choice]), set())
        truth = Truth(one)
        try:
            assert answer.num_cached_tokens == one.cached or one.choices > 1
            truth.check(fields)
        except BaseException as exc:
            exc.add_note(f"answered {one}, until {truth.end}, stopped {truth.stopped}")
            raise
        self.seen.update(truth.events)


def _find_string(detokenizer: Any, tokens: int) -> None:
    """Make the front end find the stop string with so many tokens; there is no text."""

    def update(new: list[int], stop_terminated: bool) -> str | None:
        for token in new:
            detokenizer.token_ids.append(token)
            if len(detokenizer.token_ids) >= tokens:
                return "found"
        return None

    detokenizer.update = update
