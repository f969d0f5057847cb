"""What several tests of loaders are given."""

from pathlib import Path

import huggingface_hub
import pytest

from tests.loaders.hub import FakeHub


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub without a server, in place of the real one."""
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", fake.list_repo_files)
    return fake
