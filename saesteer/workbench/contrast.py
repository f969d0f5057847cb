"""`saesteer vector` and `saesteer probe`: a direction from two files of texts, and how well it separates them.

An engine reads the texts (reading.py), separation.py has the formulas; here are files, limits, the table and what is
written, which ``--vector NAME=FILE`` reads.
"""

from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from saesteer.workbench.reading import read, tokenizer_of, tokens_of
from saesteer.workbench.separation import Direction, Rows, Separation
from saesteer.workbench.written import check_folder, rounded, say

MAX_BYTES = 64 << 20  # of a file of texts
MAX_TOKENS = 4096  # of a text
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
        raise ConfigError(f"--site names {' and '.join(sorted(kinds))}; expected one kind, since a file names layers")
    found = work.find(separation.difference_of_means)
    best = _show(console, found)
    work.write({f"layer.{parse(one.site)[1]}": one.direction.vector for one in found}, "vector", work.sites)
    work.say(f"{best.site} separates best. The vectors of all sites are", "--sites", work.sites)


def probe(console: Console, model: str, positive: Path, negative: Path, sites: Sequence[str], **rest: Any) -> None:
    """Write the logistic regression of the best site, and print how well each separates; arguments as of ``_Work``."""
    separation.need_scikit_learn()
    work = _Work(console, model, positive, negative, sites, **rest)
    best = _show(console, work.find(separation.logistic_regression), accuracy=True)
    row, bias = best.direction.vector, np.array([best.direction.bias], np.float32)
    work.write({f"layer.{parse(best.site)[1]}": row, "bias": bias}, "probe", [best.site])
    work.say(f"{best.site} separates best. Its probe is", "--reads", [best.site])


class _Work:
    """What both commands do.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`.
        positive, negative: files with a text on each line.
        sites: words of ``--site``; each names sites separated by commas, and resid_post.all is every layer.
        out: the file to write, ``*.safetensors``; an older one is replaced.
        last: read a text's last token; otherwise the mean over its tokens but the first, which is an outlier.
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
        last: bool = False,
        verbose: bool = False,
    ) -> None:
        named = [site for word in sites for site in word.split(",") if site]
        lines: dict[str, list[tuple[int, str]]] = {}
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
        self._console, self._model, self._out, self._last, self._verbose = console, model, out, last, verbose
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
        self._texts = [[*_tokens(tokenizer, files[one], lines[one])] for one in files]

    def find(self, fit: Callable[[Rows, Rows], Direction]) -> list[Found]:
        """Read the texts and fit a direction at each site to those that are not held out."""
        prompts = [ids for texts in self._texts for ids in texts]
        with steps(self._console, hidden=self._verbose) as show:
            show(f"Reading {len(prompts)} texts")
            returns = {"activations": [_wanted(site, last=self._last) for site in self.sites]}
            answers = read(self._place, self._config, self._options, prompts, returns, verbose=self._verbose)
        rows, border = rows_of(answers), len(self._texts[0])
        return [found_at(site, rows[site][:border], rows[site][border:], fit) for site in self.sites]

    def write(self, arrays: Mapping[str, Any], kind: str, sites: Sequence[str]) -> None:
        """Write a file that the loader of vectors reads, with where it comes from."""
        about = {
            "made_by": f"saesteer {kind}",
            "model": self._model,
            "sites": ",".join(sites),
            "tokens": "last" if self._last else "mean",
        }
        write_arrays(self._out.expanduser(), {name: torch.from_numpy(one) for name, one in arrays.items()}, about)

    def say(self, words: str, flag: str, sites: Sequence[str]) -> None:
        """Tell what was written, and how to serve it: ``flag`` names sites that a vector of a layer does not bring."""
        use = f"saesteer serve {self._model} --vector NAME={self._out}"
        if others := [site for site in sites if parse(site)[0] != "resid_post"]:
            use += f" {flag} {','.join(others)}"
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


def read_lines(flag: str, file: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers from 1.

    Raises:
        ConfigError: it cannot be read, is too large or has too few of them.
    """
    try:
        if (size := file.expanduser().stat().st_size) > MAX_BYTES:
            raise ConfigError(f"{flag} {file}: {size} bytes, expected at most {MAX_BYTES}")
        text = file.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{flag} {file}: cannot be read ({reason}); expected a text in UTF-8 on each line") from exc
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) < separation.LEAST:
        raise ConfigError(f"{flag} {file}: {len(lines)} lines with a text, expected at least {separation.LEAST}")
    return lines


def _tokens(tokenizer: Any, file: Path, lines: Sequence[tuple[int, str]]) -> Iterator[list[int]]:
    for number, line in lines:
        ids = tokens_of(tokenizer, line)
        if not 1 < len(ids) <= MAX_TOKENS:
            raise ConfigError(f"{file}: line {number} has {len(ids)} tokens, expected 2 to {MAX_TOKENS}")
        yield ids


def _wanted(site: str, *, last: bool) -> dict[str, Any]:
    """What is read at a site: one row."""
    if last:
        return {"site": site, "scope": {"positions": [[-1, None]]}, "reduce": "last"}
    return {"site": site, "scope": {"prompt": True, "skip_first": 1}, "reduce": "mean"}


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
