"""What is said of a gang that cannot start."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from motet.cluster.config import MotetConfig
from motet.cluster.progress import ignore_event
from motet.cluster.replicas.gang import _build_engine

BASE = Path(__file__).resolve().parents[2] / "examples" / "demo" / "base"


def test_what_a_gang_refuses_is_one_line_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a cluster whose nodes could not be examined before; with the names that settings have."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = MotetConfig.of(model_path=BASE, data_dir=tmp_path, address="auto", weights_dtype="float8")
    with pytest.raises(ValueError, match="weights_dtype = 'float8'"):
        _build_engine(config.engine, ignore_event, None, "127.0.0.1")
    (said,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert said.getMessage() == (
        "this gang cannot start: --weights-dtype = 'float8': weights in float8 are for GPUs of compute capability "
        "9.0 or more: CPUs serve those of dtype and int8"
    )
