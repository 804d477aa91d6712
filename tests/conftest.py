"""Fixtures that several test files use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli_tools import WandbStub


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbStub]:
    """A stand-in for the wandb package in this process."""
    stub = WandbStub(tmp_path / "stub")
    monkeypatch.syspath_prepend(stub.folder)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_STUB_CALLS", str(stub.calls_file))
    yield stub
    sys.modules.pop("wandb", None)
