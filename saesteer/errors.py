"""The error tree. Every error that saesteer raises on purpose is a SaesteerError; nothing here knows vLLM or torch.

::

    SaesteerError
    ├── SpecError          a request asks for something wrong         (HTTP 400, ValueError)
    │   └── PromptsFailed      some prompts of a call to LLM failed while they ran
    ├── LoadError          a weight file is wrong or unreadable
    ├── ConfigError        a start-up or command line mistake         (exit code 2)
    │   └── UnsupportedError   this vLLM, model or option cannot be served
    ├── RegistryError      a name cannot be registered or deleted now (HTTP 409)
    └── ServerError        a client's server failed or did not answer
        └── RequestRefused     it refused the request                 (HTTP 4xx)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

ARRAYS = "'saesteer[arrays]'"  # what clients need for numbers
# What clients, specs and some commands do without.
_IN_EXTRAS = "numpy", "torch", "transformers", "safetensors", "einops", "huggingface_hub", "sklearn", "matplotlib"


def reason(exc: BaseException) -> str:
    """The first line of what an exception says, or its type."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]


def printable(text: str) -> str:
    """Text out of a file that anybody may have made, in which nothing speaks to the terminal or begins a line."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)


class SaesteerError(Exception):
    """The base class of all errors that saesteer raises on purpose. Each can be pickled, as pools of processes do."""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[SaesteerError], args: tuple[object, ...], state: dict[str, object]) -> SaesteerError:
    """Return an error without its ``__init__``, which takes other arguments than ``args`` and may count refusals."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


class SpecError(SaesteerError, ValueError):
    """A request's spec is wrong.

    Args:
        message: one sentence with the value and what was expected.
        field: path of the field in the request, such as ``saesteer.edits[2].feature``.
        code: stable machine-readable reason, such as ``out_of_range``.
    """

    def __init__(self, message: str, *, field: str, code: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.code = code

    def below(self, where: str) -> "SpecError":
        """The same error, of a spec that stands in another field than ``saesteer``."""
        message = str(self).removeprefix(f"{self.field}: ")
        return SpecError(message, field=self.field.replace("saesteer", where, 1), code=self.code)


class PromptsFailed(SpecError):
    """Some prompts of a call to ``saesteer.LLM`` failed while they ran; the others have their answers.

    ``field`` and ``code`` are those of the first that failed. The message names all of them.

    Args:
        errors: index of each prompt that failed → its error.
        outputs: vLLM's output for each prompt, in the order of the prompts; None for those that failed.
    """

    def __init__(self, errors: Mapping[int, SpecError], outputs: Sequence[Any]) -> None:
        places: dict[str, list[str]] = {}  # by what went wrong
        for index, error in errors.items():
            places.setdefault(str(error), []).append(f"prompts[{index}]")
        told = "; ".join(f"{', '.join(where)}: {what}" for what, where in places.items())
        Exception.__init__(
            self, f"{len(errors)} of {len(outputs)} prompts failed, `outputs` of this error has the rest: {told}"
        )
        first = next(iter(errors.values()))
        self.field, self.code = first.field, first.code
        self.errors, self.outputs = dict(errors), list(outputs)


class LoadError(SaesteerError, ValueError):
    """A weight file is wrong or unreadable; the message names the file, the key and what was expected.

    Args:
        message: may have words of the file; what is not printable in it becomes ``·``.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class ConfigError(SaesteerError, ValueError):
    """A start-up or command line mistake; the message is one sentence."""


@contextmanager
def needs(how: str = "'saesteer[hf]', or with vLLM 'saesteer[gpu]' or 'saesteer[cpu]'") -> Iterator[None]:
    """Raise a ConfigError that says ``how`` a module is installed, if the code inside lacks one of an extra."""
    try:
        yield
    except ModuleNotFoundError as exc:
        if (name := str(exc.name).partition(".")[0]) not in _IN_EXTRAS:
            raise
        raise ConfigError(f"{name} is not installed; pip install {how} (docs/install.md)") from exc


class UnsupportedError(ConfigError):
    """This vLLM, model or option cannot be served; the message says why."""


class RegistryError(SaesteerError):
    """A vector or module cannot be registered, replaced or deleted on this server now.

    Args:
        message: one sentence that says what would help.
        code: stable machine-readable reason: ``no_room``, ``no_site`` or ``in_use``.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class ServerError(SaesteerError):
    """A client's server failed, did not answer, or answered with something unexpected.

    Args:
        message: one sentence.
        status: the HTTP status; None if there was no answer.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class RequestRefused(ServerError):
    """A server refused a client's request.

    Args:
        message: the server's message.
        status: the HTTP status, 400 for a wrong spec.
        field: path of the field in the request, such as ``saesteer.edits[2].feature``, if the server names one.
        code: stable machine-readable reason, such as ``out_of_range``, if the server gives one.
    """

    def __init__(self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=status)
        self.field = field
        self.code = code
