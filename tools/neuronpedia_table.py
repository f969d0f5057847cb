"""Writes saesteer/data/neuronpedia.tsv, Neuronpedia's sources and their places on the hub, from SAELens' table.

    pip download sae-lens --no-deps && unzip sae_lens-*.whl
    python -m tools.neuronpedia_table --folder . --date 2026-11-23

Reads SAELens' YAML file and licence as data, and imports nothing of it.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from saesteer.loaders.hub import is_id
from saesteer.loaders.neuronpedia import TABLE

# How SAELens writes a hook in a dictionary's id → the kind of site.
HOOKS = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "hook_z": "z",
    "attn.hook_z": "z",
}
_HOOK = re.compile(r"blocks\.(\d+)\.([a-z._]+?)(?:__.*)?")


def rows(table: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Address, place, model and site, which is empty unless the id says it; of what has a place of its own."""
    for release in table.values():
        for one in release["saes"]:
            path = one["id"] if one.get("path") is None else one["path"]
            if one.get("neuronpedia") and isinstance(path, str):
                found = _HOOK.fullmatch(one["id"])
                site = f"{HOOKS[found[2]]}.{found[1]}" if found and found[2] in HOOKS else ""
                place = f"{release['repo_id']}/{path}".rstrip("/")
                assert is_id(place), place
                yield one["neuronpedia"], place, release["model"], site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what the wheel of sae-lens holds")
    parser.add_argument("--date", required=True, help="of the snapshot")
    given = parser.parse_args()
    [about] = given.folder.glob("sae_lens-*.dist-info")
    version = about.name.removeprefix("sae_lens-").removesuffix(".dist-info")
    table = yaml.load((given.folder / "sae_lens/pretrained_saes.yaml").read_text(), yaml.CSafeLoader)
    head = [f"Neuronpedia's sources, from pretrained_saes.yaml of SAELens {version}, of {given.date}, reduced.", ""]
    head += [*(about / "licenses/LICENSE").read_text().strip().splitlines(), "", "source place model site"]
    lines = [f"# {line}".rstrip() for line in head]
    lines += ["\t".join(row) for row in sorted(rows(table))]
    TABLE.write_text("\n".join(lines) + "\n")
    print(f"{TABLE}: {len(lines) - len(head)} sources")


if __name__ == "__main__":
    main()
