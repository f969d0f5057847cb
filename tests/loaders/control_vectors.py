"""Control vectors in GGUF files. writers.py has files that need no other package."""

from pathlib import Path
from typing import Any

import gguf


def control_vector(file: Path, directions: dict[int, Any], architecture: str = "controlvector", **more: str) -> Path:
    """As llama.cpp's cvector-generator and repeng write it."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_string(f"{architecture}.model_hint", "llama")
    writer.add_uint32(f"{architecture}.layer_count", len(directions))
    writer.add_array("tokenizer.words", ["a", "bc", ""])
    writer.add_array("numbers", [1.5, 2.5])
    for key, value in more.items():
        writer.add_string(f"{architecture}.{key}", value)
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", direction)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
