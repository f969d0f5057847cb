"""`saesteer calibrate`: the largest activation of each feature over a text, saved next to the dictionary.

Asks the Transformers backend; does not know vLLM. ``saesteer.loaders.max_act`` saves the result and finds it again.
"""

from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import track

from saesteer.config.config import SaesteerConfig
from saesteer.config.sets import opened
from saesteer.errors import ConfigError
from saesteer.labels.gather import Gathered
from saesteer.loaders import alone, max_act
from saesteer.loaders.files import fetch
from saesteer.workbench.features import open_model
from saesteer.workbench.reads import Text, asked_of, read_text, reads, windows_of
from saesteer.workbench.windows import need_tokens
from saesteer.workbench.written import say


def run(
    console: Console, model: str, config: SaesteerConfig, file: Path, *, max_tokens: int = 100_000
) -> dict[str, Gathered]:
    """Measure every dictionary over a text file, save the results and print them.

    Args:
        console: where to print.
        model: a folder, a hub id or `demo`; it is loaded in float32.
        config: its dictionaries are measured.
        file: plain text in UTF-8.
        max_tokens: how many tokens of the text to read.

    Raises:
        SaesteerError: the model, a dictionary or the text is invalid, no token of it counts, or nothing can be saved.
    """
    text = read_text(file, max_tokens)
    if not config.dictionaries:
        raise ConfigError("calibrate needs a dictionary: --dictionary NAME=PLACE[@SITE]")
    paths = {key: fetch(source.path) for key, source in opened(config.dictionaries)[0].items()}
    with ExitStack() as aside:
        for path in paths.values():
            aside.enter_context(max_act.set_aside(path))
        drafts = {key: alone(path) for key, path in paths.items()}
        oracle, names = open_model(model, config)
        asked = asked_of(oracle, names)
        windows = windows_of(oracle, text, max_tokens)
        need_tokens("the text", windows, [one.info for one in asked.values()])
        found = {key: Gathered(one.info.features, 0) for key, one in asked.items()}
        with reads("hf", model, oracle, asked, [Text(ids) for ids in windows]) as told:
            for number, seen in enumerate(track(told, "Reading", len(windows), console=console, transient=True)):
                for key, active in seen.items():
                    found[key].add(number, active)
        for name, measured in found.items():
            site = asked[name].info.site_in
            place = max_act.write(paths[name], drafts[name], measured.max_act, tokens=measured.tokens, site=site)
            say(console, f"{_told(name, measured)} saved in {place}")
        return found


def _told(name: str, found: Gathered) -> str:
    active = found.max_act > 0
    seen = int(active.sum())
    never = len(found.max_act) - seen
    text = f"{name}: {seen:,} of {len(found.max_act):,} features were active on {found.tokens:,} tokens"
    if seen:
        text += f", maximum {float(found.max_act.max()):.3g}, median {float(found.max_act[active].median()):.3g}"
    if never:
        text += f". {never:,} were not: in unit max_act their values are 0; a longer text may activate them"
    return f"{text};"
