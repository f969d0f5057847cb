"""From `saesteer serve …` to a running `vllm serve …`: checks what can be checked without an engine, then becomes vLLM.

Knows vLLM's command line, but does not know vLLM itself.
"""

import importlib.util
import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import yaml
from rich.console import Console

from saesteer.commands import attended
from saesteer.commands.embedded import DEMO, MODELS, dictionaries, engine_options, ensure_model, request
from saesteer.config import settings
from saesteer.config.assets import Assets
from saesteer.config.checks import check_modules
from saesteer.config.config import ADMIN_KEY, CONFIG_FILE, KEY, SaesteerConfig
from saesteer.config.sources import DictionarySource
from saesteer.consumers.known import Consumers
from saesteer.errors import ConfigError, reason
from saesteer.models.families import other_widths

# Flags that change how vLLM reads the model's config: with them, only vLLM's own start checks the model's width.
_OWN_CONFIG = (
    *("--hf-config-path", "--config-format", "--hf-overrides", "--config", "--load-format"),
    *("--hf-token", "--code-revision", "--trust-remote-code"),
)
_OF_LOGS = "VLLM_LOGGING", "VLLM_CONFIGURE_LOGGING"  # variables: the log is not what `attended` reads, and is wanted
_MODELSCOPE = ("1", "true")  # of VLLM_USE_MODELSCOPE: the model is on another hub


def need_vllm() -> None:
    """Raise ConfigError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        how = "pip install 'saesteer[gpu]' or 'saesteer[cpu]'; in a clone of saesteer: make setup (docs/install.md)"
        raise ConfigError(f"vLLM is not installed; {how}")


def check(model: str, config: SaesteerConfig, flags: Sequence[str] = ()) -> Assets:
    """Report now what vLLM would report only after a minute, in a traceback: what is wrong with the model or a file.

    Args:
        model: a folder or hub id.
        config: the operator's settings.
        flags: for vLLM; those that determine how it finds the model's config are respected.

    Returns:
        The contents of the files.

    Raises:
        ConfigError: the model does not exist, a dictionary, vector or site does not fit it, or no request could use
            a module.
        LoadError: a dictionary file or a vector file is invalid.
    """
    assets = Assets.open(config)
    elsewhere = "://" in model or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in _MODELSCOPE
    if elsewhere or any(_parsed(flags, flag)[0] is not None for flag in _OWN_CONFIG):
        return assets
    shape = _text_config(model, flags)
    layers, widths = shape.num_hidden_layers, other_widths(shape)
    catalog = assets.catalog(width=shape.hidden_size, layers=layers, other_widths=widths, model=model)
    check_modules(replace(catalog, parts=True))  # whether there is a reasoning parser is known later
    return assets


def layers_of(model: str) -> int:
    """How many decoder layers a checked model has."""
    return int(_text_config(model, ()).num_hidden_layers)


def resolve(model: str, config: SaesteerConfig) -> tuple[str, SaesteerConfig, dict[str, Any]]:
    """Return model, config and vLLM's options, where a name in MODELS stands for that model with its dictionaries.

    Raises:
        ConfigError: the model cannot be obtained.
    """
    if model not in MODELS:
        return model, config, {}
    own = {name: DictionarySource(str(file)) for name, file in dictionaries(model).items()}
    folder = ensure_model(lambda step: print(step, file=sys.stderr, flush=True), name=model)  # noqa: T201  # of commands
    return str(folder), replace(config, dictionaries=own | dict(config.dictionaries)), engine_options()


def serve(
    model: str, config: SaesteerConfig, flags: Sequence[str], admin_key: str | None = None, *, verbose: bool = False
) -> NoReturn:
    """Become `vllm serve`, or on a terminal run it and exit as it does; returns only by raising an error.

    Args:
        model: a folder, a hub id, `demo` or `gemma`.
        config: the operator's settings.
        flags: for vLLM.
        admin_key: the key that the admin routes require; without one they are off.
        verbose: become it in any case, as if variables configure vLLM's log.

    Raises:
        ConfigError, LoadError: as ``check``; vLLM is not installed; a consumer does not exist or refuses its options;
            `flags` contain a wrong --additional-config; or the key cannot be sent in a header or equals a key
            that all clients use.
    """
    need_vllm()
    key = settings.admin_key() if admin_key is None else settings.checked_key(admin_key, "--saesteer-admin-key")
    api_keys = _parsed(flags, "--api-key", "*")[0] or [os.environ.get("VLLM_API_KEY", "")]
    if key and key in api_keys:
        raise ConfigError("--saesteer-admin-key equals a key of --api-key or VLLM_API_KEY, expected a different key")
    place, config, options = resolve(model, config)
    if place != model:
        # Whoever tries the demo has no key, so only this machine reaches it unless --host says otherwise.
        options |= {"served_model_name": model, "host": "127.0.0.1"}
        config = replace(config, playground=config.playground is not False)
    extra = [*flags, *_missing(flags, options)]
    check(place, config, extra).refuse_others(place)
    Consumers.open(config.consumers, config.capture_folder).close()  # what is wrong with them is said now, too
    words = ["-P", "-m", "saesteer.plugin.vllm_cli", "serve", place, *_with_config(extra, config)]
    command, variables = [sys.executable, *words], environment(os.environ, admin_key)
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    if verbose or not terminal or any(name.startswith(_OF_LOGS) for name in variables):
        sys.stdout.flush()
        os.execve(sys.executable, command, variables)
    sys.exit(attended.run(Console(), command, variables, partial(_usage, model, place, with_key=any(api_keys))))


def _usage(model: str, place: str, told: Mapping[str, str], *, with_key: bool) -> dict[str, str]:
    """How to use a server, a line for each word, from what its log tells."""
    api, key = told["API"], " -H 'Authorization: Bearer KEY'" if with_key else ""
    asks = f"{api}/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(request())}'"
    return {
        "page": told.get("playground", "none; --playground serves one"),
        "curl": f"curl -s{key} {asks if model == DEMO else f'{api}/saesteer'}",
        "model": place if place == model else f"{model}, {place}",
        "sites": told["sites"],
    }


def environment(given: Mapping[str, str], admin_key: str | None = None) -> dict[str, str]:
    """The environment for vLLM: if VLLM_PLUGINS selects plugins, saesteer is one of them.

    No process that vLLM starts imports from the current directory, where a clone of vLLM may lie. The admin key is
    passed this way as well, since any user of the machine can read a command line.
    """
    found = {**given, "PYTHONSAFEPATH": "1"}
    found.pop(CONFIG_FILE, None)  # its settings are in the command line now
    if admin_key is not None:
        found[ADMIN_KEY] = admin_key
        found.pop(f"{ADMIN_KEY}_FILE", None)
    chosen = found.get("VLLM_PLUGINS")
    if chosen is not None and KEY not in chosen.split(","):
        found["VLLM_PLUGINS"] = ",".join([*filter(None, chosen.split(",")), KEY])
    return found


def _missing(flags: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The options, as words, that neither the flags nor a file of vLLM's arguments set."""
    given = {word.partition("=")[0].replace("_", "-") for word in flags}
    in_file = _names_in(_parsed(flags, "--config")[0])
    words: list[str] = []
    for option, value in options.items():
        name = option.replace("_", "-")
        if name not in in_file and given.isdisjoint((f"--{name}", f"--no-{name}")):
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def _with_config(flags: Sequence[str], config: SaesteerConfig) -> list[str]:
    """The flags with saesteer's part merged into the user's own --additional-config, if there is one."""
    flag = "--additional-config"
    if any(word.replace("_", "-").startswith(flag + ".") for word in flags):
        raise ConfigError(
            f"{flag}.NAME cannot be combined with saesteer's own part; give it as one JSON object: {flag} '{{...}}'"
        )
    if flag[2:] in _names_in(file := _parsed(flags, "--config")[0]):
        raise ConfigError(f"--config {file} has {flag[2:]}, which saesteer's own part would replace; give it as {flag}")
    text, others = _parsed(flags, flag)
    try:
        merged = json.loads(text or "{}")
    except ValueError:
        merged = None
    if not isinstance(merged, dict):
        raise ConfigError(f"{flag} is {text!r}, expected a JSON object")
    if KEY in merged:
        raise ConfigError(f"{flag} already has {KEY!r}; use --dictionary, --vector, --sites ..., or run vllm serve")
    merged[KEY] = config.to_json()
    return [*others, flag, json.dumps(merged)]


def _names_in(file: str | None) -> set[str]:
    """The names in a file of vLLM's arguments; none without a file, or if it cannot be read, which vLLM reports."""
    try:
        found = yaml.safe_load(Path(file).read_bytes()) if file else None
    except (OSError, ValueError, yaml.YAMLError):
        return set()
    return {str(name).replace("_", "-") for name in found} if isinstance(found, dict) else set()


def _parsed(flags: Sequence[str], flag: str, nargs: str = "?") -> tuple[Any, list[str]]:
    """The last value of a flag, "" where it has none and None if it is absent, and the other words.

    vLLM takes --a-b, --a_b and --a-b=value.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    spelled = flag, "--" + flag[2:].replace("-", "_")
    parser.add_argument(*spelled, nargs=nargs, const=None if nargs == "*" else "", dest="value")
    found, others = parser.parse_known_args(flags)
    return found.value, others


def _text_config(model: str, flags: Sequence[str]) -> Any:
    from transformers import AutoConfig

    exists = Path(model).exists()
    if not exists and (model.count("/") > 1 or model.startswith((".", "~", "/"))):
        raise ConfigError(f"model {model!r}: no such folder; expected one, or a hub id such as org/name")
    revision, _ = _parsed(flags, "--revision")
    try:
        config = AutoConfig.from_pretrained(model, revision=revision or "main")
    except (OSError, ValueError, ImportError) as exc:
        found = "the folder's config cannot be read" if exists else "neither a folder nor a hub id that answers"
        raise ConfigError(f"model {model!r}: {found} ({reason(exc)})") from exc
    return config.get_text_config()
