"""Attention SAEs of Kissane and Krzyzanowski: a .pt file of z, with its config beside it."""

from pathlib import Path
from typing import Any

from tests.loaders import writers
from tests.loaders.case import Case, Row, Sample, affine, relu
from tests.loaders.writers import D, F

R = writers.raw(seed=18)
ARRAYS = {key: R[key] for key in ("W_enc", "W_dec", "b_enc", "b_dec")}
CONFIG: dict[str, Any] = {
    "act_size": D,
    "dict_size": F,
    "act_name": "blocks.3.attn.hook_z",
    "model_name": "gpt2-small",
}


def write(folder: Path, arrays: dict[str, Any], **config: Any) -> Path:
    writers.config(folder / "gpt2-small_L3_cfg.json", CONFIG | config)
    return writers.torch_file(folder / "gpt2-small_L3.pt", arrays)


pre, plain = affine(R)


def cases() -> list[Case]:
    def case(name: str, **config: Any) -> Case:
        facts = {"activation": "relu", "site_in": "z.3", "site_out": "z.3", "model": "gpt2-small"}
        return Case(
            f"connor_rob-{name}",
            lambda folder: write(folder, ARRAYS, **config),
            lambda x: relu(pre(x - R["b_dec"])),
            plain,
            facts,
        )

    return [case("z"), case("vanilla", sae_type="vanilla", input_unit_norm=False)]


def wrong() -> list[Row]:
    def row(words: str, **config: Any) -> Row:
        return f"connor_rob-{'-'.join(config)}", lambda folder: write(folder, ARRAYS, **config), f"L3_cfg.json: {words}"

    return [
        row("act_size: 0; expected", act_size=0),
        # bartbussmann/BatchTopK writes these.
        row("sae_type: 'topk'; expected relu or vanilla", sae_type="topk", top_k=4, input_unit_norm=True),
        row("sae_type: 'jumprelu'; expected relu or vanilla", sae_type="jumprelu"),
        row("top_k: 4; expected None", top_k=4),
        row("input_unit_norm: True; expected False", input_unit_norm=True),
    ]


SAMPLE = Sample("gpt2-small_L3.pt", write, ARRAYS, config="gpt2-small_L3_cfg.json")
