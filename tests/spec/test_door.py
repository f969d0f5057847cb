"""Each way a spec can be wrong by itself, with the field and the code it is refused with; and what is right."""

import base64
import json
import struct
from typing import Any

import pytest

import saesteer
from saesteer.errors import SpecError
from saesteer.language.edits import MAX_POSITIONS
from saesteer.language.fields import CODES
from saesteer.language.inline import MAX_BYTES, MAX_LIST, InlineVector
from saesteer.language.spec import (
    MAX_CHARACTERS,
    MAX_EDITS,
    MAX_VECTORS,
    Spec,
    add,
    from_json,
)

CLAMP: dict[str, Any] = {"op": "clamp", "dictionary": "gs20", "feature": 34, "value": 8.0}
ADD: dict[str, Any] = {"op": "add", "vector": "happy", "site": "resid_post.12"}
CAP: dict[str, Any] = {"op": "cap", "vector": "happy", "site": "resid_post.16", "max": 3.0}
GATE: dict[str, Any] = {"dictionary": "gs20", "feature": 99, "above": 3.0}

WHOLE: dict[str, Any] = {
    "version": 1,
    "edits": [
        {**CLAMP, "mode": "set", "unit": "raw", "only_if_active": False, "when": GATE, "scope": {"generated": True}},
        {**ADD, "scale": 4.0},
        {**CAP, "min": None, "strength": 1.0},
        {"op": "ablate", "vector": "refusal", "site": "resid_post.14", "strength": 1.0},
        {"op": "reconstruct", "dictionary": "gs20", "error": "drop"},
        {"op": "use", "module": "golden-gate", "scale": 1.0},
    ],
    "return": {
        "features": [{"dictionary": "gs20", "top_k": 8}],
        "probes": ["sentiment"],
        "activations": [{"site": "resid_post.20", "positions": "generated"}],
        "dose": True,
    },
}


def inline(items: list[float], letter: str = "f", **fields: Any) -> dict[str, Any]:
    data = base64.b64encode(struct.pack(f"<{len(items)}{letter}", *items)).decode()
    return {**ADD, "vector": {"dtype": "float32", "shape": [len(items)], "data": data, **fields}}


def without(edit: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in edit.items() if key not in keys}


def test_null_is_unset_and_a_whole_float_an_integer() -> None:
    unset = {"edits": [{**CLAMP, "mode": None, "unit": None, "scope": None}], "version": None, "defaults": None}
    assert from_json(unset | {"return": {"dose": None, "hidden": None}}) == from_json({"edits": [CLAMP]})
    assert from_json({"edits": None}) == from_json({})
    scope = {"positions": [[1.0, 2]], "skip_first": 1.0}
    found = from_json({"edits": [{**CLAMP, "feature": 34.0, "scope": scope}]})
    assert json.dumps(found.to_json()) == json.dumps(from_json(found.to_json()).to_json())
    assert '"feature": 34,' in json.dumps(found.to_json()) and "1.0" not in json.dumps(found.to_json())


WRONG: list[tuple[str, str, str, Any]] = [
    # id, field below saesteer.edits[0], code, edit
    ("no-object", "", "wrong_type", "clamp"),
    ("no-op", ".op", "missing_field", without(CLAMP, "op")),
    ("op-unknown", ".op", "unknown_name", {**CLAMP, "op": "clmp"}),
    ("op-number", ".op", "wrong_type", {**CLAMP, "op": 3}),
    ("op-list", ".op", "wrong_type", {**CLAMP, "op": ["clamp"]}),
    ("field-unknown", ".featur", "unknown_field", {**CLAMP, "featur": 3}),
    ("field-of-another-op", ".strength", "unknown_field", {**CLAMP, "strength": 1.0}),
    ("field-not-printable", "['a b\\n\\ud800']", "unknown_field", {**CLAMP, "a b\n\ud800": 3}),
    ("scope-on-use", ".scope", "unknown_field", {"op": "use", "module": "m", "scope": {}}),
    ("no-dictionary", ".dictionary", "missing_field", without(CLAMP, "dictionary")),
    ("no-feature", ".feature", "missing_field", without(CLAMP, "feature")),
    ("no-value", ".value", "missing_field", without(CLAMP, "value")),
    ("dictionary-empty", ".dictionary", "out_of_range", {**CLAMP, "dictionary": ""}),
    ("dictionary-long", ".dictionary", "out_of_range", {**CLAMP, "dictionary": "a" * 129}),
    ("dictionary-surrogate", ".dictionary", "out_of_range", {**CLAMP, "dictionary": "\ud800"}),
    ("dictionary-number", ".dictionary", "wrong_type", {**CLAMP, "dictionary": 20}),
    ("feature-negative", ".feature", "out_of_range", {**CLAMP, "feature": -1}),
    ("feature-large", ".feature", "out_of_range", {**CLAMP, "feature": 2**31}),
    ("feature-float", ".feature", "wrong_type", {**CLAMP, "feature": 34.5}),
    ("feature-bool", ".feature", "wrong_type", {**CLAMP, "feature": True}),
    ("feature-text", ".feature", "wrong_type", {**CLAMP, "feature": "34"}),
    ("feature-null", ".feature", "wrong_type", {**CLAMP, "feature": None}),
    ("value-nan", ".value", "not_finite", {**CLAMP, "value": float("nan")}),
    ("value-inf", ".value", "not_finite", {**CLAMP, "value": float("-inf")}),
    ("value-over-float32", ".value", "out_of_range", {**CLAMP, "value": 3.5e38}),
    ("value-huge-int", ".value", "out_of_range", {**CLAMP, "value": 10**400}),
    ("value-bool", ".value", "wrong_type", {**CLAMP, "value": True}),
    ("value-text", ".value", "wrong_type", {**CLAMP, "value": "8"}),
    ("mode-unknown", ".mode", "unknown_name", {**CLAMP, "mode": "sett"}),
    ("unit-unknown", ".unit", "unknown_name", {**CLAMP, "unit": "sigma"}),
    ("scale-in-max_act", ".unit", "conflict", {**CLAMP, "mode": "scale", "unit": "max_act"}),
    ("only_if_active-number", ".only_if_active", "wrong_type", {**CLAMP, "only_if_active": 1}),
    ("scope-list", ".scope", "wrong_type", {**CLAMP, "scope": []}),
    ("scope-unknown", ".scope.prompts", "unknown_field", {**CLAMP, "scope": {"prompts": True}}),
    ("scope-flag-number", ".scope.prompt", "wrong_type", {**CLAMP, "scope": {"prompt": 1}}),
    ("scope-nothing", ".scope", "empty_scope", {**CLAMP, "scope": {"prompt": False, "generated": False}}),
    ("skip-negative", ".scope.skip_first", "out_of_range", {**CLAMP, "scope": {"skip_first": -1}}),
    ("positions-none", ".scope.positions", "empty_scope", {**CLAMP, "scope": {"positions": []}}),
    ("positions-flat", ".scope.positions[0]", "wrong_type", {**CLAMP, "scope": {"positions": [1, 2]}}),
    ("positions-three", ".scope.positions[0]", "wrong_type", {**CLAMP, "scope": {"positions": [[1, 2, 3]]}}),
    *(
        (f"response-{name}", ".scope.response", "conflict", {**CLAMP, "scope": {"response": True, name: one}})
        for name, one in (("prompt", False), ("generated", True), ("part", "answer"), ("messages", "user"))
    ),
    ("positions-float", ".scope.positions[1][0]", "wrong_type", {**CLAMP, "scope": {"positions": [[1, 2], [1.5, 2]]}}),
    ("positions-null-start", ".scope.positions[0][0]", "wrong_type", {**CLAMP, "scope": {"positions": [[None, 2]]}}),
    ("positions-empty", ".scope.positions[0]", "empty_scope", {**CLAMP, "scope": {"positions": [[3, 3]]}}),
    ("positions-reversed", ".scope.positions[0]", "empty_scope", {**CLAMP, "scope": {"positions": [[-1, -3]]}}),
    ("positions-to-zero", ".scope.positions[0]", "empty_scope", {**CLAMP, "scope": {"positions": [[-1, 0]]}}),
    ("positions-far", ".scope.positions[0][1]", "out_of_range", {**CLAMP, "scope": {"positions": [[3, 2**31]]}}),
    (
        "positions-many",
        ".scope.positions",
        "too_many",
        {**CLAMP, "scope": {"positions": [[1, 2]] * (MAX_POSITIONS + 1)}},
    ),
    ("messages-none", ".scope.messages", "empty_scope", {**CLAMP, "scope": {"messages": []}}),
    ("messages-float", ".scope.messages[1]", "wrong_type", {**CLAMP, "scope": {"messages": [0, 1.0]}}),
    ("messages-flag", ".scope.messages", "wrong_type", {**CLAMP, "scope": {"messages": True}}),
    ("messages-nested", ".scope.messages[0]", "wrong_type", {**CLAMP, "scope": {"messages": [[0, 2]]}}),
    ("messages-no-role", ".scope.messages[0]", "out_of_range", {**CLAMP, "scope": {"messages": [""]}}),
    ("messages-far", ".scope.messages[0]", "out_of_range", {**CLAMP, "scope": {"messages": [2**31]}}),
    ("messages-many", ".scope.messages", "too_many", {**CLAMP, "scope": {"messages": [0] * (MAX_POSITIONS + 1)}}),
    ("messages-generated", ".scope", "empty_scope", {**CLAMP, "scope": {"messages": "user", "generated": True}}),
    ("messages-no-prompt", ".scope", "empty_scope", {**CLAMP, "scope": {"messages": "user", "prompt": False}}),
    ("when-number", ".when", "wrong_type", {**CLAMP, "when": 3}),
    ("when-many", ".when", "too_many", {**CLAMP, "when": [GATE] * 17}),
    ("when-unknown", ".when[1].over", "unknown_field", {**CLAMP, "when": [GATE, {**GATE, "over": 1}]}),
    ("when-no-bound", ".when.above", "missing_field", {**CLAMP, "when": without(GATE, "above")}),
    ("when-no-feature", ".when.feature", "missing_field", {**CLAMP, "when": without(GATE, "feature")}),
    ("when-nothing-read", ".when.dictionary", "missing_field", {**CLAMP, "when": {"above": 1.0}}),
    ("when-both-read", ".when.probe", "conflict", {**CLAMP, "when": {**GATE, "probe": "p"}}),
    ("when-never", ".when.below", "conflict", {**CLAMP, "when": {**GATE, "below": 3.0}}),
    ("when-nan", ".when.below", "not_finite", {**CLAMP, "when": {**GATE, "below": float("nan")}}),
    ("site-unknown", ".site", "unknown_name", {**ADD, "site": "resid_pst.3"}),
    ("site-number", ".site", "wrong_type", {**ADD, "site": 3}),
    ("sites-none", ".site", "out_of_range", {**ADD, "site": []}),
    ("sites-kind-in-list", ".site[1]", "unknown_name", {**ADD, "site": ["resid_post.3", "resid_post"]}),
    ("sites-twice", ".site[1]", "duplicate", {**ADD, "site": ["resid_post.3", "resid_pre.4"]}),
    ("norm-unknown", ".norm", "unknown_name", {**ADD, "norm": "matched"}),
    ("cap-no-bound", ".max", "missing_field", without(CAP, "max")),
    ("cap-reversed", ".min", "conflict", {**CAP, "min": 4.0}),
    ("error-unknown", ".error", "unknown_name", {"op": "reconstruct", "dictionary": "a", "error": "dropped"}),
    ("vector-zero", ".vector", "zero_vector", {**ADD, "vector": [0.0, -0.0]}),
    ("vector-zero-in-float32", ".vector", "zero_vector", {**ADD, "vector": [1e-50, -1e-60]}),
    ("vector-empty", ".vector", "zero_vector", {**ADD, "vector": []}),
    ("vector-nan", ".vector[1]", "not_finite", {**ADD, "vector": [1.0, float("nan")]}),
    ("vector-long-list", ".vector", "too_many", {**ADD, "vector": [1.0] * 4097}),
    ("inline-zero", ".vector.data", "zero_vector", inline([0.0, -0.0])),
    ("inline-zero-row", ".vector.data", "zero_vector", inline([1.0, 0.0], shape=[2, 1], layers=[3, 4])),
    ("inline-inf", ".vector.data", "not_finite", inline([1.0, float("inf")])),
    ("inline-half-nan", ".vector.data", "not_finite", inline([1.0, float("nan")], "e", dtype="float16")),
    ("inline-short", ".vector.data", "conflict", inline([1.0, 2.0], shape=[3])),
    ("inline-no-layers", ".vector.shape", "conflict", inline([1.0, 2.0], shape=[2, 1])),
    ("inline-layers-twice", ".vector.layers[1]", "duplicate", inline([1.0, 2.0], shape=[2, 1], layers=[3, 3])),
    ("inline-dtype", ".vector.dtype", "unknown_name", inline([1.0], dtype="float64")),
    ("inline-no-base64", ".vector.data", "wrong_type", inline([1.0], data="====")),
    ("inline-not-ascii", ".vector.data", "wrong_type", inline([1.0], data="é")),
    ("inline-bomb", ".vector.data", "too_many", inline([1.0], data="A" * (6 * 2**20))),
]


def test_vectors_have_a_limit_together() -> None:
    """Also in a spec that is a part of a request's body, whose characters nobody counts."""
    most = MAX_VECTORS // MAX_BYTES
    numbers = b"\x00\x00\x80?" * (MAX_BYTES // 4)

    def edits(many: int) -> list[Any]:
        vectors = [InlineVector("float32", (MAX_BYTES // 4,), numbers) for _ in range(many)]
        return [{"op": "add", "site": "resid_post.1", "vector": vector} for vector in vectors]

    assert len(from_json({"edits": edits(most)}).edits) == most
    assert len(from_json({"edits": edits(1) * (most + 1)}).edits) == most + 1, "one in several edits is one"
    with pytest.raises(SpecError) as caught:
        from_json({"edits": edits(most + 1)})
    assert (caught.value.field, caught.value.code) == (f"saesteer.edits[{most}].vector.data", "too_many")
    assert f"expected at most {MAX_VECTORS}" in str(caught.value)


def test_lists_count_among_all_vectors_before_they_are_read() -> None:
    most = MAX_VECTORS // 4 // MAX_LIST

    last: dict[str, Any] = {"op": "add", "site": "resid_post.1", "vector": ["no number"]}
    brought = [{**last, "vector": [1] * MAX_LIST} for _ in range(most)]
    for first in (brought, [add(one["vector"], "resid_post.1") for one in brought]):
        with pytest.raises(SpecError) as caught:
            from_json({"edits": [*first, last]})
        assert (caught.value.field, caught.value.code) == (f"saesteer.edits[{most}].vector", "too_many")
        assert f"makes {MAX_VECTORS + 4} bytes of vectors up to here" in str(caught.value)
    assert len(from_json({"edits": brought}).edits) == most


@pytest.mark.parametrize(("field", "code", "edit"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_a_wrong_edit_is_refused_by_name(field: str, code: str, edit: Any) -> None:
    with pytest.raises(SpecError) as caught:
        from_json({"edits": [CLAMP, edit]})
    assert (caught.value.field, caught.value.code) == (f"saesteer.edits[1]{field}", code)


WHOLE_WRONG: list[tuple[str, str, str, Any]] = [
    ("list", "saesteer", "wrong_type", []),
    ("null", "saesteer", "wrong_type", None),
    ("json-null", "saesteer", "wrong_type", "null"),
    ("json-in-json", "saesteer", "wrong_type", '"{}"'),
    ("no-json", "saesteer", "bad_json", "{edits: []}"),
    ("deep", "saesteer", "bad_json", "[" * 100_000),
    ("long", "saesteer", "too_many", " " * (MAX_CHARACTERS + 1)),
    ("long-number", "saesteer", "out_of_range", '{"edits": [' + "1" * 5000 + "]}"),
    ("key-twice", "saesteer", "duplicate", '{"edits": [], "edits": []}'),
    ("key-twice-below", "saesteer", "duplicate", json.dumps({"edits": [CLAMP]}).replace('"value"', '"feature"')),
    ("json-nan", "saesteer.edits[0].value", "not_finite", json.dumps({"edits": [{**CLAMP, "value": float("nan")}]})),
    ("json-1e999", "saesteer.edits[0].value", "not_finite", json.dumps({"edits": [CLAMP]}).replace("8.0", "1e999")),
    ("key-number", "saesteer", "wrong_type", {3: 4}),
    ("field-unknown", "saesteer.edit", "unknown_field", {"edit": []}),
    ("version-two", "saesteer.version", "unknown_version", {"version": 2}),
    ("version-bool", "saesteer.version", "wrong_type", {"version": True}),
    ("version-text", "saesteer.version", "wrong_type", {"version": "1"}),
    ("edits-object", "saesteer.edits", "wrong_type", {"edits": CLAMP}),
    ("edits-many", "saesteer.edits", "too_many", {"edits": [CLAMP] * (MAX_EDITS + 1)}),
    ("positions-many", "saesteer.edits[2].scope.positions", "too_many",
     {"edits": [{**CLAMP, "scope": {"positions": [[1, 2]] * (MAX_POSITIONS // 2)}}] * 3}),
    ("return-list", "saesteer.return", "wrong_type", {"return": []}),
    ("return-unknown", "saesteer.return.logits", "unknown_field", {"return": {"logits": True}}),
    ("return-dose", "saesteer.return.dose", "wrong_type", {"return": {"dose": 1}}),
    ("return-dose-text", "saesteer.return.dose", "wrong_type", {"return": {"dose": "true"}}),
    ("return-top_k", "saesteer.return.features[0].top_k", "out_of_range",
     {"return": {"features": [{"dictionary": "a", "top_k": 0}]}}),
    ("return-twice", "saesteer.return.probes[1]", "duplicate", {"return": {"probes": ["a", "a"]}}),
    ("return-site", "saesteer.return.activations[0].site[1]", "unknown_name",
     {"return": {"activations": [{"site": ["resid_post.3", "resid_post"]}]}}),
    ("return-site-twice", "saesteer.return.activations[0].site[1]", "duplicate",
     {"return": {"activations": [{"site": ["resid_post.3", "resid_pre.4"]}]}}),
    ("return-positions", "saesteer.return.activations[0].positions", "unknown_name",
     {"return": {"activations": [{"site": "resid_post.3", "positions": "answer"}]}}),
    ("return-positions-type", "saesteer.return.activations[0].positions", "wrong_type",
     {"return": {"activations": [{"site": "resid_post.3", "positions": 3}]}}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "code", "document"), [one[1:] for one in WHOLE_WRONG], ids=[one[0] for one in WHOLE_WRONG]
)
def test_a_wrong_spec_is_refused_by_name(field: str, code: str, document: Any) -> None:
    with pytest.raises(SpecError) as caught:
        from_json(document)
    assert (caught.value.field, caught.value.code) == (field, code)


def test_every_code_of_the_door_is_exercised_above() -> None:
    at_admission = {"not_served", "results_full", "too_large", "unknown_max_act", "unreadable"}
    assert {one[2] for one in WRONG + WHOLE_WRONG} == set(CODES) - at_admission


def test_messages_tell_the_value_what_was_expected_and_what_is_close() -> None:
    for document, words in [
        ({"edits": [{**CLAMP, "featur": 1}]}, ["featur", "did you mean 'feature'?", "op, dictionary, feature, value"]),
        ({"edits": [{**CLAMP, "op": "clam"}]}, ["got 'clam'", "did you mean 'clamp'?", "ablate"]),
        ({"edits": [{**CLAMP, "feature": -7}]}, ["got -7", "expected a feature of its dictionary, numbered from 0"]),
        ({"edits": [{**CLAMP, "feature": "3497"}]}, ["expected an integer (did you mean 3497 without quotes?)"]),
        ({"edits": [{**CLAMP, "value": "-2.5"}]}, ["expected a number (did you mean -2.5 without quotes?)"]),
        ({"edits": [{**CLAMP, "feature": "a&b"}]}, ["got 'a&b'", "GET /v1/saesteer/features?q=a%26b finds features"]),
        ({"edits": [{"op": "clamp", "strength": 2}]}, ["strength: is not a field (did you mean 'value'?)"]),
        ({"edits": [{"op": "add", "strength": 2}]}, ["strength: is not a field (did you mean 'scale'?)"]),
        (CLAMP, ['saesteer.op: is a field of an edit, which belongs into a list: {"edits": [...]}']),
        ({"edits": CLAMP}, ["edits: got an object of", 'expected a list, as in {"edits": [...]}']),
        ({"return": {"features": [34]}}, ["got 34", 'an object such as {"dictionary": "gs20", "features": [3124]}']),
        (
            {"return": {"activations": [{"site": "blocks.15.hook_resid_post"}]}},
            ["is not a site (did you mean 'resid_post.15'?)"],
        ),
        ({"return": {"activations": [{"site": "blocks.3.attn.hook_z"}]}}, ["did you mean 'z.3'?"]),
        ({"edits": [{**CLAMP, "dictionary": "x" * 10_000}]}, ["(10000 characters)", "1 to 128"]),
    ]:
        with pytest.raises(SpecError) as caught:
            from_json(document)
        for word in words:
            assert word in str(caught.value)
        assert len(str(caught.value)) < 500


def test_helpers_build_edits_and_check_at_once() -> None:
    built = [
        saesteer.clamp("gs20", 34, 8, when=GATE, scope={"generated": True}),
        saesteer.add("happy", "resid_post.12", 4),
        saesteer.cap("assistant", "resid_post.16", max=3),
        saesteer.ablate("refusal", "resid_post.14"),
        saesteer.reconstruct("gs20"),
        saesteer.use("golden-gate"),
    ]
    assert Spec(edits=tuple(built)).edits == from_json({**WHOLE, "edits": [
        WHOLE["edits"][0], WHOLE["edits"][1], {**CAP, "vector": "assistant"}, *WHOLE["edits"][3:]
    ]}).edits  # fmt: skip
    with pytest.raises(SpecError, match=r"^clamp\.feature: got -1, expected a feature") as caught:
        saesteer.clamp("gs20", -1, 8.0)
    assert caught.value.field == "clamp.feature"
    with pytest.raises(SpecError, match=r"^clamp\.scope\.prompt: got 3"):
        saesteer.clamp("gs20", 1, 8.0, scope={"prompt": 3})
    with pytest.raises(SpecError, match="scale"):
        saesteer.clamp("gs20", 1, 8.0, mode="scale", unit="max_act")
