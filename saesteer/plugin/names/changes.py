"""A change of names: what may be changed, and its form for other API servers. Knows no files and no workers."""

from typing import Any, NamedTuple, get_args

from saesteer.config.checks import check_module
from saesteer.dictionaries.vectors import Function, VectorSet, from_inline
from saesteer.errors import RegistryError, SpecError
from saesteer.language.fields import Fields, Json, closest, listing, number, one_of, show, text
from saesteer.language.inline import InlineVector, vector
from saesteer.language.sites import canonical
from saesteer.language.spec import Spec, from_json
from saesteer.planning.digests import Kind, Name, users_of
from saesteer.planning.plan import Catalog

MOST = 4096  # vectors, and as many modules
_STREAM = ["resid_post", "resid_pre", "resid_mid"]


class Given(NamedTuple):
    """A vector as it was registered."""

    vector: tuple[float, ...] | InlineVector
    bias: float = 0.0
    function: Function = "linear"

    @classmethod
    def read(cls, value: Any, bias: Any, function: Any = None) -> "Given":
        """From JSON.

        Raises:
            SpecError: it is not a vector, its bias is not a number, or its function is unknown.
        """
        if isinstance(value, str):
            expected = "a list of numbers or an object with dtype, shape and data; files are named at start"
            raise SpecError(f"got {show(value)}, expected {expected}", field="vector", code="wrong_type")
        found = vector(value, "vector")
        assert not isinstance(found, str)
        made: Any = "linear" if function is None else one_of(*get_args(Function))(function, "function")
        return cls(found, 0.0 if bias is None else number(bias, "bias"), made)

    def decode(self) -> VectorSet:
        """The directions."""
        return from_inline(self.vector, bias=self.bias, function=self.function)

    def to_json(self) -> Json:
        """What ``read`` takes."""
        inline = self.vector
        vector = inline.to_json() if isinstance(inline, InlineVector) else list(inline)
        return {"vector": vector, "bias": self.bias, "function": self.function}


def read(told: Fields) -> tuple[dict[str, VectorSet | None], dict[str, Spec | None]]:
    """Read the vectors and modules that changes put, by name, from their JSON objects; None for a deleted one."""
    vectors = {
        name: None if one is None else Given.read(one["vector"], one["bias"], one["function"]).decode()
        for name, one in told.get("vectors", {}).items()
    }
    return vectors, {name: None if one is None else from_json(one) for name, one in told.get("modules", {}).items()}


def of(kind: Kind, catalog: Catalog) -> Fields:
    """What the names of a kind stand for."""
    return catalog.vectors if kind == "vector" else catalog.modules


def version_of(name: Name, catalog: Catalog) -> str:
    """The beginning of a hash of what a name stands for; that of a module covers what it names."""
    kind, own = name
    found = of(kind, catalog).get(own)
    if found is None:
        return "none"
    return str(found.fingerprint if kind == "vector" else catalog.digests[own])[:16]


def check_gone(name: Name, catalog: Catalog) -> None:
    """Refuse to delete a name that is unknown or in use.

    Raises:
        SpecError: there is no such name.
        RegistryError: a module uses it.
    """
    kind, own = name
    known = of(kind, catalog)
    _check_known(own, known, "name")
    if name == ("module", catalog.default):
        message = "steers every request of this server; replace it, or clear or set the default first"
        raise RegistryError(f"module {own!r} {message}", code="in_use")
    users = users_of([name], catalog.modules, direct=True)
    if users:
        raise RegistryError(f"{kind} {own!r} is used by module {listing(users)}; delete that first", code="in_use")


def check_default(module: str, catalog: Catalog) -> None:
    """Refuse a default module that no request could use, or that does not exist, with SpecError."""
    _check_known(text(module, "module"), catalog.modules, "module")
    check_module(catalog.modules[module], catalog, "module")


def _check_known(name: str, known: Fields, field: str) -> None:
    if name not in known:
        found = f"got {show(name)}{closest(name, known)}, expected one of: {listing(known)}"
        raise SpecError(found, field=field, code="unknown_name")


def check_put(name: Name, catalog: Catalog, layers: int) -> None:
    """Refuse a new meaning of a name that this server cannot use.

    Args:
        name: the name that is put.
        catalog: the catalog that includes it.
        layers: number of the model's layers.

    Raises:
        SpecError: it cannot be used on this server.
        RegistryError: there are too many names, there is no op where it belongs, or a module could not use it.
    """
    kind, own = name
    if {".", ".."}.intersection(own.split("/")):
        found = f"got {show(own)}, expected a name without the parts '.' and '..', which clients take out of a path"
        raise SpecError(found, field="name", code="out_of_range")
    if len(of(kind, catalog)) > MOST:
        raise RegistryError(f"the server has {MOST} {kind}s already; delete one first", code="no_room")
    if kind == "vector":
        _check_vector(own, catalog, layers)
    else:
        check_module(catalog.modules[own], catalog, "spec")
    for user in users_of([name], catalog.modules):
        if (kind, own) != ("module", user):
            try:
                check_module(catalog.modules[user], catalog, user)
            except SpecError as error:
                message = f"module {user!r} uses {kind} {own!r}, and could not use this one ({error})"
                raise RegistryError(f"{message}; replace or delete the module first", code="in_use") from None


def _check_vector(name: str, catalog: Catalog, layers: int) -> None:
    found = catalog.vectors[name]
    kinds = [kind for kind, width in catalog.other_widths.items() if width == found.width] or _STREAM
    if kinds is _STREAM and found.width != catalog.width:
        others = "".join(f", or {width}, that of its {kind}" for kind, width in catalog.other_widths.items())
        message = f"is {found.width} wide, expected {catalog.width}, the width of this model{others}"
        raise SpecError(message, field="vector.shape", code="conflict")
    if found.layers and found.layers[-1] >= layers:
        message = f"got layer {found.layers[-1]}, expected layers of this model, 0 to {layers - 1}"
        raise SpecError(message, field="vector.layers", code="out_of_range")
    sites = {site for site in catalog.sites or () if catalog.width_at(site) == found.width}
    if not sites:
        hint = f"start it with --sites, such as --sites {kinds[0]}.all"
        which = f"site of this server that is {found.width} wide" if catalog.sites else "site of this server"
        raise RegistryError(f"no {which} has an op, so vector {name!r} fits nowhere; {hint}", code="no_site")
    bare = [layer for layer in found.layers or () if not sites & {canonical(f"{kind}.{layer}") for kind in kinds}]
    if bare:
        hint = "start it with --sites " + ",".join(f"{kinds[0]}.{layer}" for layer in bare[:8])
        message = f"vector {name!r} has rows for layers without an op on this server: {listing(bare)}"
        raise RegistryError(f"{message}; {hint}", code="no_site")
