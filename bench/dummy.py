"""Models of real shape without weights, with dictionaries, vectors and a tokenizer that fit them; knows no engine."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from saesteer.dictionaries.coder import CoderInfo, SparseCoder
from saesteer.loaders.formats import own

_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "vocab_size": 256000,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32768,
    "vocab_size": 262208,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def _shape(layers: int, width: int, heads: int, kv_heads: int, head: int, hidden: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "intermediate_size": hidden,
    }


MODELS = {
    "gemma-2-2b": _GEMMA2 | _shape(26, 2304, 8, 4, 256, 9216),
    "gemma-3-4b": _GEMMA3 | _shape(34, 2560, 8, 4, 256, 10240),
    "llama-3-1b": _LLAMA | _shape(16, 2048, 32, 8, 64, 8192),
    "tiny": _GEMMA3 | {"vocab_size": 512} | _shape(2, 64, 2, 1, 32, 128),  # to try a benchmark without a GPU
    "gemma-3-27b": _GEMMA3 | _shape(62, 5376, 32, 16, 128, 21504),
}


def weight_bytes(name: str) -> int:
    """What the weights of a model in MODELS take in bf16, norms left out; the embedding is the output layer too."""
    shape = {key: value for key, value in MODELS[name].items() if isinstance(value, int)}
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = width * shape["head_dim"] * 2 * (heads + shape["num_key_value_heads"])
    layer = attention + 3 * width * shape["intermediate_size"]
    return 2 * (shape["num_hidden_layers"] * layer + shape["vocab_size"] * width)


def cache_bytes(name: str) -> int:
    """What the KV cache of a model in MODELS takes for a token, in bf16."""
    shape = {key: value for key, value in MODELS[name].items() if isinstance(value, int)}
    return 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]


def model_folder(name: str, parent: Path) -> Path:
    """A folder with the config.json of a model in MODELS, for ``load_format="dummy"``."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return folder


def dictionary_file(width: int, features: int, parent: Path) -> Path:
    """A random jumprelu dictionary [features, width] in bf16; decoder rows have unit length."""
    path = parent / f"random-{width}-{features}.safetensors"
    if path.exists():
        return path
    draw = torch.Generator().manual_seed(0)
    w_dec = torch.randn(features, width, generator=draw)
    w_dec /= w_dec.norm(dim=1, keepdim=True)
    info = CoderInfo(
        format="saesteer",
        d_in=width,
        d_out=width,
        features=features,
        activation="jumprelu",
        k=None,
        in_norm="none",
        site_in=None,
        site_out=None,
        feature_unit="raw",
        has_max_act=True,
        skip_first=1,
        source="random",
        fingerprint="",
    )
    own.write(
        path,
        SparseCoder(
            w_enc=(torch.randn(features, width, generator=draw) / width**0.5).bfloat16(),
            b_enc=torch.randn(features, generator=draw) * 0.1,
            w_dec=w_dec.bfloat16(),
            b_dec=torch.zeros(width),
            info=info,
            threshold=torch.rand(features, generator=draw),
            max_act=torch.rand(features, generator=draw) + 1,
        ),
    )
    return path


def vector_file(rows: torch.Tensor, parent: Path) -> Path:
    """A file of vectors, one row [d] for each layer."""
    path = parent / "vectors.safetensors"
    save_file({f"layer.{layer}": row.contiguous() for layer, row in enumerate(rows)}, path)
    return path


def tokenizer_folder(size: int, parent: Path) -> Path:
    """A tokenizer of this many words, t0, t1 and so on: a server wants one, though prompts come as token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    folder = parent / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer(WordLevel({f"t{number}": number for number in range(size)}, unk_token="t0"))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "t0", "eos_token": "t1", "bos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
