"""The address of a feature at Neuronpedia, ``MODEL/SOURCE/INDEX``, and what it stands for. Knows no server.

It stands for a dictionary and an index: ``np:MODEL/SOURCE`` is a name of the dictionary, wherever one can be named.
"""

import re
from typing import Any
from urllib.parse import quote

from saesteer.language.fields import Fields, fail, show

PREFIX = "np:"  # in front of MODEL/SOURCE, where that stands for a dictionary's name
FORM = r"[^/\s]+/[^/\s]+/[0-9]{1,10}"
_FORM = re.compile(FORM)
_SAMPLE = "gemma-2-2b/20-gemmascope-res-16k/3124"
_EXPECTED = f"the address of a feature, such as {_SAMPLE}"


def one(given: Fields, at: str) -> Fields:
    """An object that names a feature, with dictionary and index in place of an address.

    Args:
        given: the object.
        at: its path.

    Raises:
        SpecError: the feature is another text, the address has another form, or stands next to a dictionary.
    """
    feature = given.get("feature")
    if not _is_address(feature):
        if isinstance(feature, str) and not feature.isdecimal():
            search = f"GET /v1/saesteer/features?q={quote(feature[:64])} finds features by words"
            message = f"got {show(feature)}, expected an integer, or an address such as {_SAMPLE}; {search}"
            fail(f"{at}.feature", "wrong_type", message)
        return given
    _refuse_both(given, "feature", at)
    name, index = _split(feature, f"{at}.feature")
    return {**given, "dictionary": name, "feature": index}


def several(given: Fields, at: str) -> Fields:
    """The same of an object that names several features of one dictionary.

    Raises:
        SpecError: as ``one``, or the addresses are of several dictionaries.
    """
    features = given.get("features")
    if not isinstance(features, list | tuple) or not any(map(_is_address, features)):
        return given
    _refuse_both(given, "features", at)
    found = [_split(feature, f"{at}.features[{i}]") for i, feature in enumerate(features)]
    first = found[0][0]
    for i, (name, _) in enumerate(found):
        if name != first:
            message = f"got {show(features[i])}, expected a feature of {first.removeprefix(PREFIX)} as before"
            fail(f"{at}.features[{i}]", "conflict", f"{message}: a read is of one dictionary")
    return {**given, "dictionary": first, "features": [index for _, index in found]}


def _is_address(feature: object) -> bool:
    return isinstance(feature, str) and "/" in feature


def _split(feature: Any, at: str) -> tuple[str, int]:
    if not isinstance(feature, str):
        fail(at, "wrong_type", f"got {show(feature)}, expected {_EXPECTED}")
    text = feature.removeprefix(PREFIX)
    if not _FORM.fullmatch(text):
        fail(at, "out_of_range", f"got {show(feature)}, expected {_EXPECTED}")
    source, _, index = text.rpartition("/")
    return f"{PREFIX}{source}", int(index)


def _refuse_both(given: Fields, key: str, at: str) -> None:
    if given.get("dictionary") is not None:
        fail(f"{at}.dictionary", "conflict", f"stands next to an address in {key}, expected one of the two")
