"""Engines in processes of their own, side by side on one GPU: stock vLLM, with saesteer unused, with saesteer at work.

Each is asked as Python asks it (``Offline``) or as a server is asked (``Server``). Knows loads and times, and no
statistics.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from select import select
from typing import Any

import httpx
import numpy as np
import torch

from bench import streams
from bench.asks import (
    DICTIONARY,
    FEATURES,
    MODES,
    MODULE,
    SCALE,
    VARIED,
    VECTOR,
    Load,
    Shape,
    layers_read,
    mode_of,
    probe,
    probes_of,
    reads,
    vectors,
)
from bench.dummy import cache_bytes, dictionary_file, model_folder, tokenizer_folder, vector_file, weight_bytes
from bench.offline import Times, is_served

ROOT = Path(__file__).parents[1]
START_S = 330.0  # that an engine may take
STOP_S = 6.0  # before it is killed
TOKENS_A_STEP = 8192  # a server's usual bound on a large GPU; an LLM's would be twice that
# Requests in a batch at most, however few are under way: graphs are captured for twice as many tokens, 512 at most.
# With 16 a prompt beside those that decode would run outside of graphs, as on no server.
SEATS = 256
# Of GPU memory, for what is neither weights nor cache: activations of a long step, graphs, CUDA itself.
BESIDE = 6 << 30
# For --help of what starts engines.
KEEP = "folder that stays, for models' files and what engines compile: the next command with it starts sooner"
# What each engine makes of a request with a spec.
EXPECTED = {"stock": "ignored", "disabled": "refused", "saesteer": "applied"}

Options = dict[str, Any]


def options(model: str, folder: Path, *, at_once: int, length: int, eager: bool = False) -> Options:
    """What all engines are started with; vLLM's own defaults are left alone as far as they decide speed.

    Args:
        model: one of ``bench.dummy.MODELS``.
        folder: for its files.
        at_once: requests under way at most.
        length: tokens of a request, prompt and answer.
        eager: without CUDA graphs and compilation; always so without a GPU.
    """
    found: Options = {
        "model": str(model_folder(model, folder)),
        "tokenizer": str(tokenizer_folder(Shape.of(model).vocabulary, folder)),
        "load_format": "dummy",
        "max_model_len": 2 * length,
        "max_num_seqs": max(SEATS, at_once) if on_gpu() else at_once,
        "max_num_batched_tokens": TOKENS_A_STEP,
        # Both given, so that several engines may start on one GPU, side by side.
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": cache_room(model, at_once=at_once, length=length),
    }
    return found | {"enforce_eager": True} if eager or not on_gpu() else found


def settings(model: str, folder: Path, *, modes: Collection[str] = ()) -> Options:
    """What saesteer is started with: a dictionary at the middle layer, an op, a named vector and a module at all.

    Args:
        model: one of ``bench.dummy.MODELS``.
        folder: for its files.
        modes: that are asked of it. For those that read, the stream is kept where they read it, and there are probes.
            If all others are idle, there are ops nowhere else.
    """
    shape = Shape.of(model)
    bits = torch.from_numpy(vectors(shape, 1).astype("<i2", casting="unsafe"))
    dictionary = dictionary_file(shape.width, FEATURES, folder)
    module = {"edits": [{"op": "add", "vector": VECTOR, "site": "resid_post", "scale": SCALE}]}
    found: Options = {
        "dictionaries": {DICTIONARY: f"{dictionary}@resid_post.{shape.layers // 2}"},
        "vectors": {VECTOR: str(vector_file(bits.view(torch.bfloat16), folder))},
        "modules": {MODULE: module},
        "sites": ["resid_post.all"],
    }
    if not reads(modes):
        return found
    more = _reading(modes, shape, folder)
    if all(one.reads or one.asks == "nothing" for one in map((MODES | VARIED).__getitem__, modes)):
        return {"dictionaries": found["dictionaries"], **more}
    return found | more | {"vectors": found["vectors"] | more["vectors"]}


def _reading(modes: Collection[str], shape: Shape, folder: Path) -> Options:
    """The sites that modes read, with probes if one has them, and room for what loads read."""
    layers = sorted({layer for name in modes for layer in layers_read((MODES | VARIED)[name], shape)})
    files = {}
    if "probes" in modes:
        draw = np.random.default_rng(2)
        for name, _ in probes_of(shape):
            files[name] = str(folder / f"{name}.npy")
            np.save(files[name], draw.standard_normal(shape.width, dtype=np.float32))
    most = {"max_read_mib": 1 << 16, "max_results_mib": 1 << 20}
    return {"reads": [f"resid_post.{layer}" for layer in layers], "vectors": files, **most}


@contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    """A folder for models' files, logs and what engines compile.

    Args:
        keep: this one, which stays, so that the next command's engines find what they compiled; None: a temporary one.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def cache_room(model: str, *, at_once: int, length: int) -> int:
    """Bytes for the KV cache: half as much again as a full batch takes, since old prompts stay in it for a while."""
    return max(64 << 20, cache_bytes(model) * at_once * length * 3 // 2)


def memory(model: str, *, at_once: int, length: int) -> int:
    """Bytes of GPU memory that one engine takes, as reckoned beforehand."""
    return weight_bytes(model) + cache_room(model, at_once=at_once, length=length) + BESIDE


def on_gpu() -> bool:
    """Whether there is one; unlike ``is_available`` this leaves CUDA unused in this process."""
    return torch.cuda.device_count() > 0


class Engine(ABC):
    """A process that serves one engine.

    Args:
        kind: a key of ``EXPECTED``.
        model: one of ``bench.dummy.MODELS``.
        given: those of ``options``.
        own: those of ``settings``; read by saesteer alone.
        folder: for its log and vLLM's caches.
    """

    def __init__(self, kind: str, model: str, given: Options, own: Options, folder: Path) -> None:
        self.kind = kind
        self.shape = Shape.of(model)
        self.log = folder / f"{kind}.log"
        command = self._command(given, own if kind == "saesteer" else None, folder)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=self._environment(folder),
                stdin=subprocess.PIPE,
                stdout=self._stdout(log),
                stderr=log,
                text=True,
                start_new_session=True,  # so that its own processes end with it
            )

    def _environment(self, folder: Path) -> dict[str, str]:
        """Of the process: its own caches, and which of vLLM's plugins it loads."""
        environment = {**os.environ, "VLLM_CACHE_ROOT": str(folder / f"cache-{self.kind}")}
        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        environment.pop("SAESTEER_DISABLE", None)
        if self.kind == "stock":
            environment["VLLM_PLUGINS"] = ""
        else:
            environment.pop("VLLM_PLUGINS", None)
        if not on_gpu():  # engines take turns, but each would bind all cores
            environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return environment

    @abstractmethod
    def _command(self, given: Options, own: Options | None, folder: Path) -> list[str]:
        """Module and arguments."""

    def _stdout(self, log: Any) -> Any:
        return log

    @abstractmethod
    def _judge(self) -> str:
        """Wait until it answers, and tell what it makes of a spec."""

    @abstractmethod
    def _times(self, load: Load) -> Times:
        """Run a load."""

    def ready(self) -> None:
        """Wait until it serves.

        Raises:
            SystemExit: it died, took too long, or is not the engine that it should be.
        """
        found = self._judge()
        if found != EXPECTED[self.kind]:
            message = f"the engine {self.kind!r} has {found} a spec, expected {EXPECTED[self.kind]}"
            self.fail(f"{message}; is saesteer installed beside vLLM, with its entry point?")

    def run(self, load: Load) -> Times:
        """Times of a load, every steered answer of which says that its edits changed tokens, or has what it reads.

        Raises:
            SystemExit: the engine died, or an answer is not what it should be.
        """
        try:
            times = self._times(load)
        except (RuntimeError, OSError, ValueError) as error:
            self.fail(f"the engine {self.kind!r} failed in {load}: {error}")
        expected = load.requests if mode_of(load).asks != "nothing" else 0
        if times.served != expected:
            self.fail(
                f"{times.served} of {load.requests} answers say that they were served, expected {expected}: {load}"
            )
        return times

    def fail(self, why: str) -> None:
        """Say why, with the end of the engine's log, and end the benchmark."""
        print(self.log.read_text(errors="replace")[-6000:], file=sys.stderr)
        raise SystemExit(why)

    def signal(self, how: int) -> bool:
        """Send a signal to all its processes; whether there was one left."""
        self.process.poll()  # or it would stay as a zombie, and count as one left
        try:
            os.killpg(self.process.pid, how)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _check_alive(self, since: float) -> None:
        if self.process.poll() is not None:
            self.fail(f"the engine {self.kind!r} died with exit code {self.process.returncode}")
        if time.monotonic() > since + START_S:
            self.fail(f"the engine {self.kind!r} did not start within {START_S:.0f} s")


class Offline(Engine):
    """An ``LLM``."""

    def _command(self, given: Options, own: Options | None, folder: Path) -> list[str]:
        return ["bench.offline", json.dumps({"options": given, "settings": own, "shape": asdict(self.shape)})]

    def _stdout(self, log: Any) -> Any:
        return subprocess.PIPE

    def _line(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.fail(f"the engine {self.kind!r} died with exit code {self.process.wait()}")
        return json.loads(line)

    def _judge(self) -> str:
        assert self.process.stdout is not None
        if not select([self.process.stdout], [], [], START_S)[0]:
            self._check_alive(time.monotonic() - START_S)
        return str(self._line())

    def _times(self, load: Load) -> Times:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(load)) + "\n")
        self.process.stdin.flush()
        return Times(**self._line())


class Server(Engine):
    """An OpenAI server; this process is its client."""

    def _command(self, given: Options, own: Options | None, folder: Path) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        shown = {**given, "host": "127.0.0.1", "port": self.port, "served_model_name": streams.MODEL}
        words = [shown.pop("model"), *_flags(shown)]
        if own is None:
            return [
                "saesteer.plugin.vllm_cli",
                "serve",
                *words,
            ]  # vLLM's own command line, under any name of its package
        place = folder / "settings.yaml"
        place.write_text(json.dumps(own))  # JSON is YAML
        return ["saesteer", "serve", *words, "--saesteer-config", str(place)]

    def _judge(self) -> str:
        since = time.monotonic()
        place = f"http://127.0.0.1:{self.port}"
        while not _is_healthy(place):
            self._check_alive(since)
            time.sleep(0.5)
        # Not as a stream: vLLM answers 200 to those before it looks at them, and says what is wrong in the first event.
        body = {"model": streams.MODEL, "prompt": list(range(2, 10)), "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{place}/v1/completions", json={**body, "saesteer": probe()}, timeout=START_S)
        if answer.status_code == 200:
            return "applied" if is_served(answer.json().get("saesteer")) else "ignored"
        return "refused" if answer.status_code == 400 else f"answered {answer.status_code} to"

    def _times(self, load: Load) -> Times:
        return streams.drive(self.port, streams.prepare(load, self.shape), load.at_once, run_in=load.run_in)


WAYS: Mapping[str, type[Engine]] = {"llm": Offline, "http": Server}


def stop(running: Sequence[Engine]) -> None:
    """End them all, soon: on a lent machine waiting costs."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        for engine in running:
            engine.signal(how)
        end = time.monotonic() + STOP_S
        while sum(engine.signal(0) for engine in running):
            if time.monotonic() > end:
                break
            time.sleep(0.1)


def _flags(given: Mapping[str, Any]) -> Sequence[str]:
    """Options as vLLM's command line takes them."""
    words: list[str] = []
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def _is_healthy(place: str) -> bool:
    try:
        return httpx.get(f"{place}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
