"""`saesteer vector` and `saesteer probe`: a direction from two files of texts, and how well it separates them.

An engine reads the texts (reading.py), texts.py has the files and their tokens, separation.py the formulas; here are
limits, the table and what is written, which ``--vector NAME=FILE`` reads.
"""

from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from saesteer.commands.serve import check, layers_of, resolve
from saesteer.commands.waiting import steps
from saesteer.config.config import SaesteerConfig
from saesteer.errors import ConfigError
from saesteer.language.sites import canonical, expand_sites, parse
from saesteer.loaders.write import write_arrays
from saesteer.workbench import separation
from saesteer.workbench.reading import read, tokenizer_of
from saesteer.workbench.separation import Direction, Rows, Separation
from saesteer.workbench.texts import Line, Tokens, read_lines, read_tokens
from saesteer.workbench.written import check_folder, rounded, say

MAX_ROWS = 50_000  # texts times sites: of a model that is 4096 wide, 0.8 GB


class Found(NamedTuple):
    """What was found at one site."""

    site: str
    direction: Direction
    separation: Separation  # of the texts held out


def vector(console: Console, model: str, positive: Path, negative: Path, sites: Sequence[str], **rest: Any) -> None:
    """Write the difference of means at every site, and print how well each separates; arguments as of ``_Work``."""
    work = _Work(console, model, positive, negative, sites, **rest)
    if len(kinds := {parse(site)[0] for site in work.sites}) > 1:
        raise ConfigError(f"--site names {' and '.join(sorted(kinds))}; expected one kind for a file")
    found = work.find(separation.difference_of_means)
    best = _show(console, found)
    work.write({one.site: one.direction.vector for one in found}, "vector")
    work.say(f"{best.site} separates best. The vectors of all sites are")


def probe(console: Console, model: str, positive: Path, negative: Path, sites: Sequence[str], **rest: Any) -> None:
    """Write the logistic regression of the best site, and print how well each separates; arguments as of ``_Work``."""
    separation.need_scikit_learn()
    work = _Work(console, model, positive, negative, sites, **rest)
    best = _show(console, work.find(separation.logistic_regression), accuracy=True)
    row, bias = best.direction.vector, np.array([best.direction.bias], np.float32)
    work.write({best.site: row, "bias": bias}, "probe")
    work.say(f"{best.site} separates best. Its probe is")


class _Work:
    """What both commands do.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`.
        positive, negative: files of texts, or of chats.
        sites: words of ``--site``; each names sites separated by commas, and resid_post.all is every layer.
        out: the file to write, ``*.safetensors``; an older one is replaced.
        tokens: of a text, or of a chat's answer, that are read.
        verbose: show vLLM's output.

    Raises:
        SaesteerError: the model, a file or a site is wrong, or the engine failed.
    """

    def __init__(
        self,
        console: Console,
        model: str,
        positive: Path,
        negative: Path,
        sites: Sequence[str],
        *,
        out: Path,
        tokens: Tokens = "mean",
        verbose: bool = False,
    ) -> None:
        named = [site for word in sites for site in word.split(",") if site]
        lines: dict[str, list[Line]] = {}
        wrong: list[str] = []  # all of it at once
        for part in (
            lambda: _check_out(out),
            lambda: expand_sites(named, 1),
            lambda: lines.update(positive=read_lines("--positive", positive)),
            lambda: lines.update(negative=read_lines("--negative", negative)),
        ):
            try:
                part()
            except ConfigError as error:
                wrong.append(str(error))
        if wrong:
            raise ConfigError("; ".join(wrong))
        self._console, self._model, self._out, self._tokens, self._verbose = console, model, out, tokens, verbose
        config = SaesteerConfig().changed({"reads": named})
        self._place, _, self._options = resolve(model, config)
        check(self._place, config)
        self.sites = [*dict.fromkeys(map(canonical, expand_sites(named, layers_of(self._place))))]
        if not self.sites:
            raise ConfigError("--site names no site, expected one or several, such as resid_post.12,resid_post.20")
        if (rows := sum(map(len, lines.values())) * len(self.sites)) > MAX_ROWS:
            raise ConfigError(f"texts times sites are {rows:,}, expected at most {MAX_ROWS:,}")
        self._config = replace(config, reads=tuple(self.sites))
        tokenizer = tokenizer_of(self._place)
        files = {"positive": positive, "negative": negative}
        self._texts = [[*read_tokens(tokenizer, files[one], lines[one])] for one in files]

    def find(self, fit: Callable[[Rows, Rows], Direction]) -> list[Found]:
        """Read the texts and fit a direction at each site to those that are not held out."""
        texts = [*chain(*self._texts)]
        with steps(self._console, hidden=self._verbose) as show:
            show(f"Reading {len(texts)} texts")
            returns = [{"activations": [one.wanted(site, self._tokens) for site in self.sites]} for one in texts]
            prompts = [one.ids for one in texts]
            answers = read(self._place, self._config, self._options, prompts, returns, verbose=self._verbose)
        rows, border = rows_of(answers), len(self._texts[0])
        return [found_at(site, rows[site][:border], rows[site][border:], fit) for site in self.sites]

    def write(self, arrays: Mapping[str, Any], kind: str) -> None:
        """Write a file that the loader of vectors reads, with where it comes from."""
        about = {"made_by": f"saesteer {kind}", "model": self._model, "tokens": self._tokens}
        write_arrays(self._out.expanduser(), {name: torch.from_numpy(one) for name, one in arrays.items()}, about)

    def say(self, words: str) -> None:
        """Print what was written, and how to serve it."""
        use = f"saesteer serve {self._model} --vector NAME={self._out}"
        say(self._console, f"{words} in {self._out}\nServe: {use}")


def _check_out(out: Path) -> None:
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out}: expected the name of a file that ends in .safetensors")
    check_folder("--out", out)


def found_at(site: str, positive: Rows, negative: Rows, fit: Callable[[Rows, Rows], Direction]) -> Found:
    """A direction fitted to some rows, and its separation of the rest.

    Raises:
        ConfigError: the rows do not differ.
    """
    (learned, held), (learned_others, held_others) = separation.split(positive), separation.split(negative)
    direction = fit(learned, learned_others)
    if not direction.vector.any():
        raise ConfigError(f"the texts of both files are the same at {site}, expected texts that differ")
    return Found(site, direction, Separation.of(direction, held, held_others))


def rows_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, Rows]:
    """The one row of each answer, by site: float64 [answers, d]."""
    found: dict[str, list[Any]] = {}
    for answer in answers:
        for one in answer["activations"]:
            found.setdefault(one["site"], []).append(np.frombuffer(b64decode(one["data"]), "<f4"))
    return {site: np.stack(rows).astype(np.float64) for site, rows in found.items()}


def _show(console: Console, found: Sequence[Found], *, accuracy: bool = False) -> Found:
    """Print a row for each site; returns the one that separates best, the earliest of equals."""
    best = max(found, key=lambda one: one.separation)
    columns = ["site", "AUC", "Cohen's d", *(["accuracy"] if accuracy else [])]
    table = rounded(*columns, title="Texts held out", title_justify="left")
    for one in found:
        numbers = [f"{one.separation.auc:.3f}", f"{one.separation.d:.2f}"]
        numbers += [f"{one.separation.accuracy:.1%}"] if accuracy else []
        table.add_row(one.site, *numbers, style="bold" if one is best else "")
    console.print(table)
    say(
        console,
        "AUC: share of the pairs of texts in which the positive one scores higher. "
        "Cohen's d: (mean of the positive − mean of the negative scores) / their pooled standard deviation.",
    )
    return best
