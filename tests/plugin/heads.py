"""Heads that guess the next tokens of the tiny Llama (asked.py), so well that some guesses hold, and so badly that some
do not. Nothing is trained by steps: one head has the model's own layers, the other one is a least-squares solution.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.plugin.asked import LAYERS, WIDTH, tiny_llama

READ = [1, 2, 3]  # the layers before which EAGLE 3 gets the stream
RIDGE = 1e-3


def head(folder: Path, how: str, prompts: list[list[int]], tokens: int) -> str:
    """The folder of a head, below this one.

    Args:
        folder: of the model, too.
        how: eagle or eagle3.
        prompts: that it knows.
        tokens: of each prompt's answer that it knows.
    """
    model, place = Path(tiny_llama(folder)), folder / how
    place.mkdir(exist_ok=True)  # an engine that failed is started again for each test
    config = json.loads((model / "config.json").read_text())
    given = load_file(model / "model.safetensors")
    embeddings = given["model.embed_tokens.weight"]
    layers = {name.removeprefix("model."): one for name, one in given.items() if name.startswith("model.layers.")}
    if how == "eagle":
        # The embedding goes through all layers of the model. Only the first has no norm in front of its attention: all
        # embeddings are taken for equally long.
        made = {name: one for name, one in layers.items() if not name.startswith("layers.0.input_layernorm")}
        for name in ("q_proj", "k_proj", "v_proj"):
            made[f"layers.0.self_attn.{name}.weight"] /= embeddings.square().mean().sqrt()
        made["fc.weight"] = torch.cat([torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)], dim=1)
    else:
        config |= {"num_hidden_layers": 1, "eagle_config": {"eagle_aux_hidden_state_layer_ids": READ}}
        streams, wanted = _known(model, prompts, tokens)
        made = {name.replace("layers.0", "midlayer"): one for name, one in layers.items() if "layers.0." in name}
        for name in ("q_proj", "k_proj", "v_proj"):  # the embedding beside the stream
            own = made[f"midlayer.self_attn.{name}.weight"]
            made[f"midlayer.self_attn.{name}.weight"] = torch.cat([own, own], dim=1)
        for name in ("self_attn.o_proj", "mlp.down_proj"):  # nothing but the stream comes through
            made[f"midlayer.{name}.weight"].zero_()
        made |= {"midlayer.hidden_norm.weight": torch.ones(WIDTH), "norm.weight": torch.ones(WIDTH)}
        made["lm_head.weight"], made["fc.weight"] = _factors(streams, wanted, len(embeddings))
    save_file({**made, "embed_tokens.weight": embeddings}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def _known(model: Path, prompts: list[list[int]], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Streams before ``READ`` side by side, and the token behind the one that the model makes of each."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model)
    streams, wanted = [], []
    for prompt in prompts:
        whole = llama.generate(torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        with torch.no_grad():
            hidden = llama(whole, output_hidden_states=True).hidden_states
        streams.append(torch.cat([hidden[at][0] for at in READ], dim=1)[len(prompt) - 1 : -2])
        wanted.append(whole[0, len(prompt) + 1 :])
    return torch.cat(streams).double().numpy(), torch.cat(wanted).numpy()


def _factors(streams: np.ndarray, wanted: np.ndarray, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the least-squares map from streams to tokens, the best product of two matrices through WIDTH numbers."""
    targets = np.eye(vocabulary)[wanted]
    square = streams.T @ streams + RIDGE * np.eye(streams.shape[1])
    left, sizes, right = np.linalg.svd(np.linalg.solve(square, streams.T @ targets).T, full_matrices=False)
    first, second = left[:, :WIDTH], sizes[:WIDTH, None] * right[:WIDTH]
    return tuple(torch.from_numpy(np.ascontiguousarray(one)).float() for one in (first, second))  # type: ignore[return-value]


assert max(READ) < LAYERS
