"""Metrics of a server with several processes. Starts nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")


def test_metrics_are_summed_over_processes(tmp_path: Path) -> None:
    code = (
        "from saesteer.plugin.results import metrics\n"
        "metrics.refused('before')\n"
        "metrics.install(('dose',)); metrics.install(('dose',))\n"
        "metrics.edited([{'tokens_edited': 3}, {'tokens_edited': 4}, {'op': 'given up'}])\n"
        "metrics.refused('unknown_name')\n"
        "metrics.pools({'resid_post.3': (2, 5)})\n"
        "from prometheus_client import generate_latest\n"
        "from vllm.v1.metrics.prometheus import get_prometheus_registry\n"
        "print(generate_latest(get_prometheus_registry()).decode())\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for times in (1, 2):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("saesteer")]
        zeros = {line.removesuffix(" 0.0") for line in lines if line.endswith(" 0.0")}
        assert {'saesteer_refusals_total{code="dose"}', 'saesteer_rules_total{op="stop"}'} < zeros, "from the start"
        assert sorted(line for line in lines if not line.endswith(" 0.0")) == [
            f"saesteer_edited_tokens_total {7.0 * times}",
            'saesteer_pool_rows_in_use{site="resid_post.3"} 2.0',
            'saesteer_pool_rows{site="resid_post.3"} 5.0',
            f'saesteer_refusals_total{{code="unknown_name"}} {1.0 * times}',
        ]
