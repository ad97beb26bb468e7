"""The doctor on the default model: green, and every promise really put to the test."""

from __future__ import annotations

import pytest

from quickdraft.doctor.run import Settings, run
from tests.support.model import default_model_path

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


def test_the_default_model_is_healthy() -> None:
    default_model_path()  # or a hint to pull it
    report = run("smollm2-135m", Settings(measure_costs=False))
    assert report.ok and not any(check.skipped for check in report.checks), report
    said = {check.name: check.detail for check in report.checks}
    assert "SHA-256 as published" in said["files"] and "<|im_end|>" in said["chat template"]
    assert "1720 of 1720" in said["prefix cache"]
    assert "lookup" in said["drafters"] and "copying: plain" in said["gain"]
