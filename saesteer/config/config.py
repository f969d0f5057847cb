"""The operator's settings at start: one list of options, each with its check. Opens no file; does not know vLLM.

The wire form is vLLM's ``additional_config["saesteer"]``, so every process of a server sees the same:

    {"dictionaries": {"gs20": {"path": "org/repo/folder", "site": "resid_post.20"}},
     "vectors": {"happy": {"path": "happy.gguf"}, "sentiment": {"path": "probe.npy", "bias": -0.5}},
     "modules": {"golden-gate": "golden-gate.json", "calm": {"edits": [...]}},
     "default_module": "calm", "sites": ["resid_post.all"], "reads": ["resid_post.12"], "max_read_mib": 64,
     "consumers": {"filesystem": {"folder": "runs"}}, "capture": ["resid_post.12"], "capture_folder": "rows",
     "max_edits": 64, "pool_rows": 64, "inline_rows": 1,
     "max_dose": 0.5, "max_dose_action": "clamp"}
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from os import PathLike, fspath
from typing import Any, Literal, NamedTuple, get_args

from saesteer.config.sources import DictionarySource, VectorSource
from saesteer.errors import ConfigError, SpecError
from saesteer.language.edits import Scope
from saesteer.language.fields import (
    Check,
    Fields,
    Json,
    fail,
    flag,
    integer,
    known_field,
    list_of,
    mapping,
    number,
    one_of,
    optional,
    plain,
    record,
    show,
    step,
    text,
)
from saesteer.language.inline import Function
from saesteer.language.sites import expand_sites
from saesteer.language.spec import as_object

KEY = "saesteer"
ADMIN_KEY = "SAESTEER_ADMIN_KEY"  # in the environment: the key that the admin routes require
CONFIG_FILE = "SAESTEER_CONFIG"  # the same: the settings file, where something else makes the engine's arguments
# Name of a limit → the least, the usual and the largest value.
LIMITS = {
    "max_edits": (1, 64, 4096),
    "max_read_mib": (1, 64, 65536),
    "pool_rows": (0, 64, 65536),
    "inline_rows": (0, 1, 64),
    "fail_fast_after": (4, 16, 4096),
    "max_results_mib": (1, 8192, 1 << 20),
    "result_seconds": (1, 3600, 7 * 86400),
}
_USUAL = {name: usual for name, (_, usual, _) in LIMITS.items()}
DoseAction = Literal["clamp", "refuse"]  # scale a token's change down to the limit, or end its request with an error
MAX_DOSE = 1e6  # largest value of the limit itself; a larger one would limit nothing
_MOST_MODELS = _MOST_HOSTS = 64
_LLM = ("LLM",)  # as Option.python


def _word(value: Any, at: str) -> str:
    if not isinstance(value, str):
        fail(at, "wrong_type", f"got {show(value)}, expected a text")
    return value


def _site(value: Any, at: str) -> str:
    expand_sites([text(value, at)], 1)
    return str(value)


def _host(value: Any, at: str) -> str:
    if "/" in text(value, at):
        fail(at, "out_of_range", f"got {show(value)}, expected a host name without a scheme, such as box.example")
    return str(value)


def _up_to(most: float, what: str) -> Check:
    """A number above 0; ``what`` is expected, in words."""

    def check(value: Any, at: str) -> float:
        if not 0 < number(value, at) <= most:
            fail(at, "out_of_range", f"got {show(value)}, expected {what}")
        return float(value)

    return check


_SITES = list_of(_site, 1 << 16)
_function = one_of(*get_args(Function))


def _action(value: Any, at: str) -> Any:
    return "clamp" if value is None else one_of(*get_args(DoseAction))(value, at)


def _source(cls: type, from_text: Callable[[str], Any], **parts: Check) -> Check:
    """A source, a text that stands for one, or an object with its parts; the first part is required."""
    required, *_ = parts

    def check(value: Any, at: str) -> Any:
        if isinstance(value, cls):
            return value
        if isinstance(value, str | PathLike):
            return from_text(fspath(value))
        if not isinstance(value, Mapping) or required not in value or value.keys() - parts.keys():
            form = ", ".join(f"{part!r}: ..." for part in parts)
            fail(at, "wrong_type", f"got {show(value)}, expected a path or {{{form}}}")
        return cls(**{part: parts[part](found, f"{at}.{part}") for part, found in value.items()})

    return check


def _module(value: Any, at: str) -> str | Json:
    if isinstance(value, str | PathLike):
        return fspath(value)
    found = plain(as_object(value))
    if not isinstance(found, dict):
        fail(at, "wrong_type", f"got {show(value)}, expected the path of a JSON file or a spec")
    return found


def _scope(value: Any, at: str) -> Scope | None:
    scope: Scope | None = optional(record(Scope))(value, at)
    if scope is not None and scope.messages is not None:
        fail(f"{at}.messages", "not_served", "names messages, which not every request has; expected positions or flags")
    return scope


def _options(value: Any, at: str) -> Json:
    """The options of a consumer, which checks them itself; null stands for none."""
    return dict(mapping({} if value is None else value, at))


def _named(check: Check) -> Check:
    """An object whose keys are valid names in requests, since nobody could request any others."""

    def check_all(value: Any, at: str) -> Json:
        if not isinstance(value, Mapping):
            fail(at, "wrong_type", f"got {show(value)}, expected an object of name: place")
        return {text(name, f"{at} has a wrong name"): check(one, step(at, name)) for name, one in value.items()}

    return check_all


class Option(NamedTuple):
    """One setting of the operator."""

    flag: str  # its flag of ``saesteer serve``; empty: it stands in the settings file or additional_config alone
    metavar: str | None  # the flag's value in the help text
    check: Check  # returns a value of the wire form as SaesteerConfig holds it
    help: str
    python: tuple[str, ...] = ("LLM", "hf")  # which of saesteer.LLM and saesteer.hf.Model also take it


def _limit(name: str, about: str, python: tuple[str, ...]) -> Option:
    low, usual, high = LIMITS[name]
    return Option(f"--{name.replace('_', '-')}", None, integer(low, high), f"{about}; default {usual}.", python)


OPTIONS: dict[str, Option] = {
    "dictionaries": Option(
        "--dictionary",
        "NAME=[rows:]PLACE[@@REVISION][@SITE]",
        _named(
            _source(
                DictionarySource,
                DictionarySource.from_argument,
                path=_word,
                site=optional(_word),
                rows=flag,
                version=optional(text),
                revision=optional(_word),
            )
        ),
        "A dictionary or a set, and its name in requests. PLACE is a file, a folder, a hub id, or np:MODEL/SOURCE of "
        "Neuronpedia; @@REVISION is a commit, tag or branch of the hub; @SITE says where it belongs if its files do "
        "not, @LAYERS chooses from a set. With rows: its weights stay in the file, and a request's features are read "
        "from there. Repeatable.",
    ),
    "sites": Option(
        "--sites",
        "SITE,...",
        _SITES,
        "Sites to instrument in addition to those of the dictionaries; resid_post.all is every layer. Repeatable.",
    ),
    "reads": Option(
        "--reads",
        "SITE,...",
        _SITES,
        "Sites whose tensors requests may read, in addition to those where dictionaries and vectors of one layer read. "
        "Repeatable.",
    ),
    "max_read_mib": _limit(
        "max_read_mib",
        "MiB that one request may read into its answer, and a quarter of what it may read by handle",
        _LLM,
    ),
    "max_edits": _limit("max_edits", "Table entries that one request may use", ("LLM", "hf")),
    "vectors": Option(
        "--vector",
        "NAME=FILE[#ROW][@SITE]",
        _named(_source(VectorSource, VectorSource, path=_word, bias=optional(number), function=optional(_function))),
        "Vectors and their name in requests: a file of tensors, NumPy arrays, GGUF or JSON. #ROW or #NAME takes a part "
        "of it, @SITE says where it belongs, hidden_states: in front that its rows are hidden_states. Repeatable.",
    ),
    "modules": Option(
        "--module", "NAME=FILE", _named(_module), "A spec as a JSON file, and its name in requests. Repeatable."
    ),
    "pool_rows": _limit("pool_rows", "Slots for vectors at every site", ()),
    "inline_rows": _limit("inline_rows", "Inline vectors, and features by rows, of one request at every site", _LLM),
    "max_results_mib": _limit("max_results_mib", "MiB of all results that are kept to be fetched by a handle", _LLM),
    "result_seconds": _limit("result_seconds", "Seconds that a result is kept", _LLM),
    "dictionary_folder": Option(
        "--dictionary-folder",
        "FOLDER",
        optional(_word),
        "Every dictionary below a folder, by rows; its path there is its name. Only --sites give it sites.",
        _LLM,
    ),
    "dictionaries_of": Option(
        "--dictionaries-of",
        "MODEL,...",
        list_of(text, _MOST_MODELS),
        "Models whose dictionaries fit the served one, where its name does not say it, such as gemma-2-2b for a "
        "fine-tune. Repeatable.",
    ),
    "default_module": Option(
        "--default-module",
        "NAME",
        optional(text),
        'A module that steers every request, unless it has "defaults": false.',
    ),
    "default_scope": Option("", None, _scope, "The scope of edits that name none, those of modules included.", ()),
    "require": Option(
        "--require",
        "default|spec,...",
        list_of(one_of("default", "spec"), _MOST_MODELS),
        'default refuses "defaults": false, so that the default module steers every request; spec refuses requests '
        "that ask for nothing, whatever the default module does. --default-module-required and --require-spec are "
        "short for them. Repeatable.",
        _LLM,
    ),
    "max_dose": Option(
        "--max-dose",
        None,
        optional(_up_to(MAX_DOSE, f"a number above 0, {MAX_DOSE:.0f} at most")),
        "How much edits may change a token at a site, in lengths of the stream, such as 0.5; default: no limit.",
    ),
    "max_dose_action": Option(
        "--max-dose-action",
        "|".join(get_args(DoseAction)),
        _action,
        "What to do with a larger change: scale it down to the limit, or end its request with an error; default clamp.",
        _LLM,
    ),
    "consumers": Option(
        "--consumer",
        "NAME[=JSON]",
        _named(_options),
        "A consumer that requests may name, with its options as a JSON object. Repeatable.",
        _LLM,
    ),
    "capture": Option(
        "--capture",
        "SITE,...",
        _SITES,
        "Sites whose rows of every request's tokens go to --capture-folder, without being in answers. Repeatable.",
        _LLM,
    ),
    "capture_folder": Option("--capture-folder", "FOLDER", optional(_word), "Where --capture writes its shards.", _LLM),
    "fail_fast": Option(
        "--fail-fast/--no-fail-fast",
        None,
        flag,
        "End a request with an error once its hidden states or logits are not finite, or its answer repeats itself; "
        "off by default.",
        _LLM,
    ),
    "fail_fast_after": _limit(
        "fail_fast_after",
        "Tokens of repetition, with a period of up to 16 tokens, after which --fail-fast ends an answer",
        _LLM,
    ),
    "memory_guard": Option(
        "--memory-guard",
        None,
        optional(_up_to(1, "a share above 0, 1 at most, such as 0.9")),
        "Refuse new requests with 503 while more than this share of the machine's or container's memory is in use, "
        "such as 0.9; default: never.",
        (),
    ),
    "allow_hosts": Option(
        "--allow-host",
        "HOST,...",
        list_of(_host, _MOST_HOSTS),
        "Hosts that a request may name in its Host header, beside localhost, where the server listens on a loopback "
        "address and has no key. Repeatable.",
        (),
    ),
    "playground": Option(
        "--playground/--no-playground",
        None,
        optional(flag),
        "Serve a page at /saesteer/ to try features on: search, sliders, plain and steered answers; on for `demo`.",
        (),
    ),
    "neuronpedia": Option(
        "--neuronpedia",
        None,
        flag,
        "Serve the routes of Neuronpedia's inference server, for its front end and its clients.",
        (),
    ),
}


@dataclass(frozen=True, slots=True)
class SaesteerConfig:
    """The operator's settings, one field for each option; immutable, equal in every process of a server."""

    dictionaries: Mapping[str, DictionarySource] = field(default_factory=dict)
    sites: tuple[str, ...] = ()  # in addition to those that the dictionaries need; "resid_post.all": every layer
    reads: tuple[str, ...] = ()  # sites whose tensors requests may read, in addition to where dictionaries read
    max_read_mib: int = _USUAL["max_read_mib"]  # MiB that one request may read out
    max_edits: int = _USUAL["max_edits"]  # table entries of one request, over all sites
    vectors: Mapping[str, VectorSource] = field(default_factory=dict)
    modules: Mapping[str, str | Fields] = field(default_factory=dict)  # a JSON file's path, or the spec
    pool_rows: int = _USUAL["pool_rows"]  # slots at every site for vectors
    inline_rows: int = _USUAL["inline_rows"]  # inline vectors, and features by rows, of one request at every site
    max_results_mib: int = _USUAL["max_results_mib"]  # MiB of all that are kept to be fetched by a handle
    result_seconds: int = _USUAL["result_seconds"]  # that each of them is kept
    dictionary_folder: str | None = None  # every dictionary below it is served by rows, at the sites that have an op
    dictionaries_of: tuple[str, ...] = ()  # models whose dictionaries fit the served one
    default_module: str | None = None  # the module that every request uses first, unless it opts out
    default_scope: Scope | None = None  # of edits that name none
    require: tuple[str, ...] = ()  # "default": no request may opt out of it; "spec": each must ask for something
    max_dose: float | None = None  # how much edits may change a token at a site, in stream lengths; None: no limit
    max_dose_action: DoseAction = "clamp"  # what happens to a token above the limit
    consumers: Mapping[str, Fields] = field(default_factory=dict)  # that requests may name, with options
    capture: tuple[str, ...] = ()  # sites whose rows go, for every request, to consumers with the option "all"
    capture_folder: str | None = None  # and into shards here
    fail_fast: bool = False  # whether a request ends once what it computes is not sound
    fail_fast_after: int = _USUAL["fail_fast_after"]  # tokens of repetition after which its answer is not
    memory_guard: float | None = None  # share of the memory above which new requests are refused; None: never
    allow_hosts: tuple[str, ...] = ()  # that requests may name where only this machine can send some, without a key
    playground: bool | None = None  # whether the page at /saesteer/ is served; None: the operator has not said
    neuronpedia: bool = False  # whether the routes of Neuronpedia's inference server are served

    @property
    def kept(self) -> tuple[str, ...]:
        """The sites whose tensors are kept because the operator names them."""
        return *self.reads, *self.capture

    @classmethod
    def from_json(cls, raw: Any) -> "SaesteerConfig":
        """Read the wire form.

        Raises:
            ConfigError: an unknown field, a wrong type or a value out of range.
        """
        return cls().changed(raw)

    def changed(self, raw: Any) -> "SaesteerConfig":
        """A copy in which the options of the wire form replace its own.

        Raises:
            ConfigError: an unknown field, a wrong type or a value out of range.
        """
        try:
            raw = mapping(raw, f"additional_config.{KEY}")
            for key in raw:
                if key not in OPTIONS:
                    known_field(key, f"additional_config.{KEY}", OPTIONS)
            made = replace(self, **{key: OPTIONS[key].check(value, f"{KEY}.{key}") for key, value in raw.items()})
            if raw.get("max_dose_action") is not None and made.max_dose is None:
                found = f"got {show(made.max_dose_action)} without {KEY}.max_dose, expected both or neither"
                fail(f"{KEY}.max_dose_action", "conflict", found)
            if made.fail_fast_after != _USUAL["fail_fast_after"] and not made.fail_fast:
                found = f"got {made.fail_fast_after} without {KEY}.fail_fast, expected both or neither"
                fail(f"{KEY}.fail_fast_after", "conflict", found)
            taken = made.capture_folder is not None or any(one.get("all") is True for one in made.consumers.values())
            if made.capture and not taken:
                found = "has no place for the rows, expected --capture-folder, or a consumer with the option all"
                fail(f"{KEY}.capture", "conflict", found)
            if taken and not made.capture:
                found = "is missing, expected sites for --capture-folder, or for the consumer with the option all"
                fail(f"{KEY}.capture", "missing_field", found)
        except SpecError as exc:
            raise ConfigError(str(exc)) from exc
        return made

    def to_json(self) -> Json:
        """The wire form, for vLLM's ``additional_config``."""
        return asdict(self) | ({"max_dose_action": None} if self.max_dose is None else {})
