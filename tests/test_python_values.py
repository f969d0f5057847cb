"""What Python callers may pass: arrays as vectors, edits as modules, typed edits; and errors that travel."""

import copy
import importlib
import json
import pickle
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import saesteer
from saesteer import errors
from saesteer.config.config import SaesteerConfig
from saesteer.dictionaries.vectors import row_digests, rows_of
from saesteer.errors import ConfigError, PromptsFailed, SaesteerError, SpecError
from saesteer.language.spec import from_json
from tests.hf_models import IDS, SITE, V, made_with

if TYPE_CHECKING:
    from saesteer.client import AsyncClient, Client

    def typed(llm: saesteer.LLM, client: Client, other: AsyncClient) -> None:
        """mypy reads this and nothing runs it: each form of ``steer`` and of a vector has a type."""
        edit = saesteer.add(np.zeros(3), "resid_post.1")
        for steer in (edit, [edit], {"edits": [edit]}, saesteer.Spec(), None):
            llm.generate("a", steer=steer)
            llm.chat([], steer=steer)
            client.chat("a", steer=steer)
            _ = other.complete("a", steer=steer)
            client.register_module("a", steer)
        llm.generate(["a", "b"], steer=[edit, None])
        llm.generate("a", steer=saesteer.clamp("demo", 3, 2.0))
        saesteer.ablate(torch.zeros(3), "resid_post.1")
        client.register_vector("a", np.zeros(3))
        client.register_vector("a", torch.zeros(3))


NUMBERS = [0.5, -2.0, 3.25]
ARRAYS = [
    np.array(NUMBERS),
    np.array(NUMBERS, dtype=np.float32),
    np.array([*NUMBERS, 9.0], dtype=np.float16)[:3],
    torch.tensor(NUMBERS),
    torch.tensor(NUMBERS, dtype=torch.bfloat16, requires_grad=True),
    torch.tensor([NUMBERS, NUMBERS]).T[:, 0],
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda one: f"{type(one).__name__}-{one.dtype}")
@pytest.mark.parametrize("make", [saesteer.add, saesteer.ablate, saesteer.cap])
def test_an_array_is_the_vector_of_its_numbers(make: Any, array: Any) -> None:
    bound = {"max": 1.0} if make is saesteer.cap else {}
    edit = make(array, "resid_post.1", **bound)
    assert rows_of(edit.vector)[None].tolist() == NUMBERS
    assert row_digests(edit.vector) == row_digests(make(NUMBERS, "resid_post.1", **bound).vector)
    again = from_json(json.loads(json.dumps({"edits": [edit.to_json()]})))
    assert again.edits[0] == edit
    assert from_json({"edits": [{**edit.to_json(), "vector": array}]}) == again


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.ones((2, 3)), r"vector: got the shape \[2, 3\], expected one dimension"),
        (torch.tensor(1.0), r"vector: got the shape \[\], expected one dimension"),
        (np.array([1.0, np.nan]), r"vector\[1\]: got nan, expected a finite number"),
        (np.array([1.0, 1e300]), r"vector\[1\]: got 1e\+300, expected a number that float32 can hold"),
        (torch.tensor([1, 1j]), r"vector\[0\]: got a complex, expected a number"),
        (np.array(["a"]), r"vector\[0\]: got 'a', expected a number"),
        (np.array([True]), r"vector\[0\]: got true, expected a number"),
        (np.array([]), r"vector.shape\[0\]: got 0, expected an integer from 1"),
        (np.zeros(3), r"vector.data: row 0 is zero, expected a direction"),
    ],
)
def test_a_wrong_array_is_refused(array: Any, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        saesteer.add(array, "resid_post.1")


EDIT = saesteer.add(V.numpy(), SITE, scale=3.0)


@pytest.mark.parametrize(
    "module",
    [
        EDIT,
        [EDIT],
        {"edits": [EDIT]},
        EDIT.to_json(),
        {"edits": [{**EDIT.to_json(), "vector": V}]},
        saesteer.Spec([EDIT]),
    ],
    ids=["edit", "edits", "object with edits", "object of one", "object with a tensor", "spec"],
)
def test_a_module_may_be_what_steers(module: Any, tmp_path: Path) -> None:
    wire = SaesteerConfig.from_json({"modules": {"m": module}}).to_json()
    assert json.loads(json.dumps(wire))["modules"]["m"]["edits"][0]["op"] == "add", "it goes to every process as JSON"
    with made_with(tmp_path, modules={"m": module}) as model:
        expected = model.logits(IDS, steer=EDIT)
        assert torch.equal(model.logits(IDS, steer={"op": "use", "module": "m"}), expected)
        assert not torch.equal(model.logits(IDS), expected)


def test_a_module_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"saesteer\.modules\.m: got 3, expected the path of a JSON file or a spec"):
        SaesteerConfig.from_json({"modules": {"m": 3}})


def classes(cls: type[SaesteerError] = SaesteerError) -> Iterator[type[SaesteerError]]:
    """The classes of all errors in the package; their modules are imported first."""
    for one in pkgutil.walk_packages(saesteer.__path__, "saesteer."):
        if one.name.split(".")[1] in ("errors", "consumers", "engine", "planning", "config", "client", "loaders"):
            importlib.import_module(one.name)
    found = [SaesteerError]
    for one_class in found:
        found += [below for below in one_class.__subclasses__() if below.__module__.startswith("saesteer.")]
    return iter(found)


WORDS: dict[str, dict[str, Any]] = {
    "SpecError": {"field": "saesteer.edits[0]", "code": "conflict"},
    "RegistryError": {"code": "no_room"},
    "ServerError": {"status": 502},
    "RequestRefused": {"status": 409, "field": "a", "code": "b"},
}


def made(cls: type[Any]) -> SaesteerError:
    """An error of this class, with something in each of its fields."""
    if issubclass(cls, PromptsFailed):
        return cls({1: errors.SpecError("first", field="f", code="c")}, ["out", None])
    if cls.__name__ == "SpecRefused":
        return cls(made(errors.SpecError))
    found: SaesteerError = cls("one sentence", **WORDS.get(cls.__name__, {}))
    return found


def test_every_error_travels_between_processes() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    importlib.import_module("saesteer.plugin.results.errors")
    found = [*classes()]
    assert {"RegistryError", "SpecRefused", "DiskError", "RequestRefused"} <= {cls.__name__ for cls in found}
    for cls in found:
        error = made(cls)
        error.add_note("a note")
        for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert type(again) is cls and str(again) == str(error)
            assert repr(vars(again)) == repr(vars(error))
