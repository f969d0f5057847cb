"""Where dictionaries and vectors of a server come from, as the operator names them. Opens no file."""

from dataclasses import InitVar, dataclass

from saesteer.language.inline import Function
from saesteer.language.sites import split_site

ROWS = "rows:"  # before a place: the dictionary stays in its file
PIN = "@@"  # behind a place, before a revision, as in loaders/hub.py, which takes longer to import


@dataclass(frozen=True, slots=True)
class DictionarySource:
    """Where a dictionary's weights are: a path or hub id, and the site when the files do not say it."""

    path: str  # of the hub, with @@REVISION at its end if one was chosen
    site: str | None = None
    rows: bool = False  # the weights stay in the file; the rows of a feature are read when a request asks for it
    version: str | None = None  # the beginning of the fingerprint that it must have
    revision: InitVar[str | None] = None  # becomes a part of the path

    def __post_init__(self, revision: str | None) -> None:
        if revision:
            object.__setattr__(self, "path", f"{self.path}{PIN}{revision}")

    @classmethod
    def from_argument(cls, text: str) -> "DictionarySource":
        """Read ``[rows:]PLACE[@@REVISION][@SITE]``, as on the command line."""
        place = text.removeprefix(ROWS)
        return cls(*split_site(place), place != text)

    @property
    def reads(self) -> str | None:
        """The site that it reads, as far as this says it."""
        return (self.site or "").partition(":")[0] or None


@dataclass(frozen=True, slots=True)
class VectorSource:
    """Where vectors are, as ``read_vectors`` takes it, and a probe's bias and function in place of the file's."""

    path: str
    bias: float | None = None
    function: Function | None = None
