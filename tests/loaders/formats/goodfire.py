"""Files of Goodfire and what they mean: two linear layers, and a name that ends in the layer."""

from typing import Any

import torch

from tests.loaders import writers
from tests.loaders.case import Case, Row, Sample, affine, relu

R = writers.raw(seed=18)


def linear(encoder: str, decoder: str) -> dict[str, Any]:
    arrays: dict[str, Any] = {f"{encoder}.weight": R["W_enc"].T, f"{encoder}.bias": R["b_enc"]}
    return arrays | {f"{decoder}.weight": R["W_dec"].T, f"{decoder}.bias": R["b_dec"]}


ARRAYS = linear("encoder_linear", "decoder_linear")


pre, plain = affine(R)


def cases() -> list[Case]:
    def case(name: str, file: str, arrays: dict[str, Any], site: str | None, model: str | None) -> Case:
        facts = {"activation": "relu", "site_in": site, "site_out": site, "model": model}
        return Case(
            f"goodfire-{name}",
            lambda folder: writers.torch_file(folder / file, arrays),
            lambda x: relu(pre(x)),
            plain,
            facts,
        )

    llama, r1 = "Llama-3.1-8B-Instruct", "DeepSeek-R1-Distill-Llama-8B"
    return [
        case("8b", f"{llama}-SAE-l19.pth", ARRAYS, "resid_post.19", llama),
        case("qresearch", f"{r1}-SAE-l19.pt", linear("encoder", "decoder"), "resid_post.19", r1),
        case("copied", "mine.pt", ARRAYS, None, None),
    ]


def wrong() -> list[Row]:
    named, plain = "Llama-SAE-l19.pt", linear("encoder", "decoder")
    said = {"k": 64, "activation": "TopK", "cfg": {"k": 64, "activation": "topk"}}
    more = {key: {key: value} for key, value in said.items()}
    unread = {"list": ["topk", 64], "nested": {"act": {"k": 64}}, "held-list": {"layers": [19]}}
    unread |= {"held-tensor": {"k": torch.tensor(64)}}

    def row(name: str, file: str, arrays: dict[str, Any], words: str) -> Row:
        return f"goodfire-{name}", lambda folder: writers.torch_file(folder / file, arrays), words

    return [
        *(row(key, named, plain | what, f"{named}: {key}: ") for key, what in more.items()),
        *(row(key, "mine.pt", ARRAYS | {"cfg": what}, "mine.pt: cfg: ") for key, what in unread.items()),
        row("linear", "mine.pt", ARRAYS | more["k"], "mine.pt: k: 64; expected two linear layers and no more"),
        row("unnamed", "mine.pt", plain, "mine.pt: a file of no known format"),
    ]


SAMPLE = Sample("a.pth", lambda folder, arrays: writers.torch_file(folder / "a.pth", arrays), ARRAYS)
