"""Stand-ins for a model and its tokenizer that tell a command what it needs, and a small dictionary for them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from saesteer.commands.embedded import DEMO_SAE
from saesteer.loaders import load
from saesteer.loaders.formats import own
from saesteer.planning.plan import Catalog


class Tokenizer:
    """One token for each letter, 1 at the beginning. A token is the text x.

    Args:
        lines: the token of a new line is a new line. In such a text no other letter may have this token, as n has.
    """

    bos_token_id = 1

    def __init__(self, lines: bool = False) -> None:
        self._newline = 12 if lines else None

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> Any:
        ids = [ord(letter) % 50 + 2 for letter in text]
        spans = [(at, at + 1) for at in range(len(text))]
        return SimpleNamespace(input_ids=[1, *ids] if add_special_tokens else ids, offset_mapping=spans)

    def decode(self, ids: list[int]) -> str:
        return "".join("\n" if one == self._newline else "x" for one in ids)

    def batch_decode(self, ids: list[list[int]]) -> list[str]:
        return [f"token{one}" for [one] in ids]


class Oracle:
    """A model whose stream is a fixed random row for each token, and that remembers what it was asked to read.

    Args:
        place: of its only dictionary, by any name.
        positions: how many the model has.
        lines: see the tokenizer.
    """

    def __init__(self, place: str, positions: int = 2048, lines: bool = False) -> None:
        self.tokenizer = Tokenizer(lines)
        self._coder = load(place)
        self.rows = torch.randn(64, self._coder.info.d_in, generator=torch.Generator().manual_seed(0))
        self.read: list[list[int]] = []
        shape = SimpleNamespace(max_position_embeddings=positions)
        self.model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: shape))
        self.engine = SimpleNamespace(catalog=Catalog({}, None, 1))

    def coder(self, name: str, layer: None) -> Any:
        return self._coder

    def layers_of(self, name: str) -> tuple[None]:
        return (None,)

    def info(self, name: str, layer: None) -> Any:
        return replace(self._coder.info, site_in="resid_post.15", site_out="resid_post.15")

    def streams(self, ids: list[int]) -> dict[str, torch.Tensor]:
        self.read.append(list(ids))
        return {"resid_post.15": self.rows[torch.tensor(ids)]}


def small(folder: Path, *, long: float | None = None, **changes: Any) -> str:
    """The place of a small dictionary without max_act, of which the last two features are never active.

    Args:
        folder: for its file.
        long: the length of all decoder rows; default: as they were drawn.
        changes: of what it says of itself.
    """
    draw = torch.Generator().manual_seed(1)
    coder = load(DEMO_SAE)
    info = replace(coder.info, features=40, d_in=24, d_out=24, has_max_act=False, skip_first=3, **changes)
    w_enc, w_dec = (torch.randn(40, 24, generator=draw) for _ in range(2))
    made = replace(
        coder,
        info=info,
        w_enc=w_enc,
        w_dec=w_dec if long is None else long * torch.nn.functional.normalize(w_dec),
        b_enc=torch.cat([torch.zeros(38), torch.full((2,), -1000.0)]),
        b_dec=torch.zeros(24),
        threshold=torch.full((40,), 0.5),
        max_act=None,
    )
    own.write(folder / "small.safetensors", made)
    return str(folder / "small.safetensors")
