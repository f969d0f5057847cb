"""What Neuronpedia's activation routes answer, out of what one or two passes over a prompt read. Knows no route.

Only active features are listed: where Neuronpedia's server fills a list up with features of the value 0, this one ends.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from pybase64 import b64decode

from saesteer.config.decoders import site_of_hook
from saesteer.dictionaries.vectors import numbers_of
from saesteer.language.fields import fail, listing, show
from saesteer.language.sites import canonical
from saesteer.plugin.http.neuronpedia import activation_shapes as shapes
from saesteer.plugin.http.neuronpedia.host import Host
from saesteer.plugin.http.neuronpedia.meaning import Json, Place, Prompt, check_finite, place_of, sources_of

MOST = 1000  # results of a request for the strongest features, as at Neuronpedia
MOST_ACTIVE = 1024  # features of a token that one read lists
_USUAL, _USUAL_OF_TOKEN = 25, 5
_DECIMALS, _DECIMALS_16_BIT = 3, 4  # of what /source and /raw answer, as at Neuronpedia
_PROMPT = {"prompt": True}

Keys = dict[tuple[int, int], float]  # number of the dictionary, feature → what features are sorted by


async def single(host: Host, asked: shapes.SingleOf, text: str) -> shapes.SingleResponse:
    """One feature, or the products of a vector with the stream, at each token of a text."""
    prompt = await host.prompt(text)
    if (asked.source is not None and asked.index is not None) == (asked.vector is not None and asked.hook is not None):
        fail("source", "conflict", "got both or neither of source with index and vector with hook, expected one")
    if asked.source is None or asked.index is None:
        assert asked.vector is not None and asked.hook is not None
        return _values(await _products(host, prompt, asked.vector, asked.hook), prompt, 0)
    place, index = place_of(host.catalog, asked.source, asked.model), _index(asked.index)
    found = await host.features(prompt, {place: {"features": [index], "scope": _PROMPT}})
    values = _column(found[place], index, prompt)
    values = [0.0 if one == prompt.bos else value for one, value in zip(prompt.ids, values, strict=True)]
    return _values(values, prompt, int(prompt.begins))


def _index(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 10:
        fail("index", "out_of_range", f"got {show(text)}, expected the number of a feature, as text")
    return int(text)


def _values(values: list[float], prompt: Prompt, start: int) -> shapes.SingleResponse:
    kept = values[start:]
    if not kept:
        fail("prompt", "empty_scope", "has no token behind BOS, expected some text")
    tokens, special = [*prompt.tokens[start:]], [*prompt.special[start:]]
    return shapes.SingleResponse(activation=shapes.Values(**_peak(kept)), tokens=tokens, tokens_is_special=special)


def _peak(values: list[float]) -> Json:
    """The fields of ``shapes.Values``."""
    top = max(values)
    return {"values": values, "max_value": top, "max_value_index": values.index(top)}


async def _products(host: Host, prompt: Prompt, vector: Sequence[float], hook: str) -> list[float]:
    site = site_of_hook(hook)
    if site is None:
        fail("hook", "unknown_name", f"got {show(hook)}, expected a hook such as blocks.20.hook_resid_post")
    report = await host.read(prompt, {"activations": [{"site": site, "scope": _PROMPT}]})
    [entry] = map(_tensor, report["activations"])
    if entry.shape[1] != len(vector):
        fail("vector", "conflict", f"is {len(vector)} wide, expected {entry.shape[1]}, the width of {site}")
    if not np.all(np.abs(vector) <= np.finfo(np.float32).max):
        fail("vector", "not_finite", "has a number that float32 does not hold, expected one that float32 holds")
    found: list[float] = (entry.astype(np.float64) @ np.array(vector)).tolist()
    return found


def _tensor(entry: Json) -> Any:
    """The tensor of an entry in an answer's activations, float32 [tokens, width]."""
    found = numbers_of(entry["dtype"], b64decode(entry["data"])).reshape(entry["shape"])
    check_finite(found.ravel(), f"the tensor at {entry['site']}")
    return found


def _column(rows: Sequence[Json], feature: int, prompt: Prompt) -> list[float]:
    """The values of a feature, by position."""
    values = [0.0] * len(prompt.ids)
    for row in rows:
        values[row["position"]] = row["features"][str(feature)]
    return values


async def strongest(host: Host, asked: shapes.AllOf, text: str) -> shapes.AllResponse:
    """The features with the largest values in a text, over all sources, and their values at each token.

    One pass finds them: a feature among the n with the largest maxima is among the n strongest of the token where it
    has its maximum. The next one reads their values at all tokens.
    """
    prompt = await host.prompt(text)
    sources = sources_of(host.catalog, asked.source_set, asked.selected_sources)
    by_key: dict[str, Place] = {}
    for one in (place_of(host.catalog, source, asked.model) for source in sources):
        by_key.setdefault(one.key, one)
    places = [*by_key.values()]
    most = max(1, min(_USUAL if asked.num_results is None else asked.num_results, MOST))
    silent = int(asked.ignore_bos and prompt.begins)  # tokens at the beginning whose values count as 0
    if asked.sort_by_token_indexes:
        keys = await _sums(host, prompt, places, asked.sort_by_token_indexes, silent)
    else:
        keys = {}
        for number, row in await _tops(host, prompt, places, most, [[silent, None]]):
            for index, value in row["top"]:
                keys[number, index] = max(value, keys.get((number, index), value))
    chosen = sorted(keys, key=lambda one: (-keys[one], one))[:most]
    wanted = {place: [index for at, index in chosen if at == number] for number, place in enumerate(places)}
    reads = {place: {"features": some, "scope": _PROMPT} for place, some in wanted.items() if some}
    rows = await host.features(prompt, reads) if reads else {}
    found = []
    for number, index in chosen:
        place = places[number]
        values = [0.0] * silent + _column(rows[place], index, prompt)[silent:]
        total = keys[number, index] if asked.sort_by_token_indexes else 0.0
        about: Json = {"source": place.source, "index": index, "sum_values": total}
        found.append(shapes.AllFeature(**about, **_peak(values)))
    return shapes.AllResponse(activations=found, tokens=[*prompt.tokens])


async def _sums(host: Host, prompt: Prompt, places: Sequence[Place], tokens: Sequence[int], start: int) -> Keys:
    """The sums over some tokens, of all features that are active at one of them."""
    times = Counter(tokens)
    wrong = sorted(at for at in times if not 0 <= at < len(prompt.ids))
    if wrong:
        message = f"got {listing(wrong)}, expected tokens of the prompt, 0 to {len(prompt.ids) - 1}"
        fail("sortByTokenIndexes", "out_of_range", message)
    spans = [[at, at + 1] for at in sorted(times) if at >= start]
    keys: Keys = {}
    for number, row in await _tops(host, prompt, places, MOST_ACTIVE, spans):
        _check_whole(places[number], row)
        for index, value in row["top"]:
            keys[number, index] = keys.get((number, index), 0.0) + value * times[row["position"]]
    return keys


async def _tops(
    host: Host, prompt: Prompt, places: Sequence[Place], most: int, spans: Sequence[Sequence[Any]]
) -> list[tuple[int, Json]]:
    """The strongest features of some tokens of a prompt: the number of the dictionary, and the row of a token."""
    spans = [span for span in spans if span[0] < len(prompt.ids)]
    if not spans:
        return []
    scope = {"positions": spans, "generated": False}
    reads = {one: {"top_k": min(most, one.info.features), "scope": scope} for one in places}
    found = await host.features(prompt, reads)
    return [(number, row) for number, place in enumerate(places) for row in found[place]]


def _check_whole(place: Place, row: Json) -> None:
    """Refuse a token of which features are active that the read has not listed."""
    if len(row["top"]) == MOST_ACTIVE < place.info.features:
        message = f"{place.source}: at token {row['position']} {MOST_ACTIVE} features or more are active"
        fail("source", "not_served", f"{message}, expected fewer")


async def by_token(host: Host, asked: shapes.TopkOf, text: str) -> shapes.TopkResponse:
    """The strongest features of each token of a text."""
    prompt = await host.prompt(text)
    place = place_of(host.catalog, asked.source, asked.model)
    start = int(asked.ignore_bos and prompt.begins)
    most = max(1, min(_USUAL_OF_TOKEN if asked.top_k is None else asked.top_k, MOST_ACTIVE))
    results = [
        shapes.TopkToken(
            token=prompt.tokens[at],
            token_position=at,
            is_special=prompt.special[at],
            top_features=[shapes.TopkFeature(feature_index=one, activation_value=value) for one, value in row["top"]],
        )
        for _, row in await _tops(host, prompt, [place], most, [[start, None]])
        for at in [row["position"]]
    ]
    return shapes.TopkResponse(results=results, tokens=[*prompt.tokens[start:]])


async def active(host: Host, asked: shapes.SourceRequest, text: str) -> shapes.SourceResult:
    """All active features of a text, without its first token."""
    prompt = await host.prompt(text)
    place = place_of(host.catalog, asked.source, asked.model)
    found: dict[str, list[tuple[int, float]]] = {}
    for _, row in await _tops(host, prompt, [place], MOST_ACTIVE, [[1, None]]):
        _check_whole(place, row)
        for index, value in sorted(row["top"]):
            found.setdefault(str(index), []).append((row["position"], round(value, _DECIMALS)))
    return shapes.SourceResult(tokens=[*prompt.tokens], active_features=found)


async def raw(host: Host, asked: shapes.RawRequest, text: str) -> shapes.RawResult:
    """The stream behind layers, at the last token of a text."""
    if (asked.hook_point, asked.type) != ("residual_stream", "final_output_token"):
        fail("hookPoint", "not_served", "or type is another, expected residual_stream and final_output_token")
    count = host.model.hf_text_config.num_hidden_layers
    layers = sorted(set(asked.layers or range(count)))
    if layers[0] < 0 or layers[-1] >= count:
        fail("layers", "out_of_range", f"got {listing(layers)}, expected layers of the model, 0 to {count - 1}")
    prompt = await host.prompt(text)
    scope = {"positions": [[-1, None]], "generated": False}
    sites = [canonical(f"resid_post.{layer}") for layer in layers]
    report = await host.read(prompt, {"activations": [{"site": site, "scope": scope} for site in sites]})
    rows = {one["site"]: _tensor(one)[0].tolist() for one in report["activations"]}
    places = None if str(host.model.dtype) == "torch.float32" else _DECIMALS_16_BIT
    activations = [
        shapes.RawLayer(
            layer=layer,
            token_indices=[len(prompt.ids) - 1],
            values=[[one if places is None else round(one, places) for one in rows[site]]],
        )
        for layer, site in zip(layers, sites, strict=True)
    ]
    return shapes.RawResult(token_strings=[*prompt.tokens], token_ids=[*prompt.ids], activations=activations)
