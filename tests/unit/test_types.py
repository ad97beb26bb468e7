"""SamplingParams and Speculation refuse what they cannot mean."""

from __future__ import annotations

from typing import Any

import pytest

from quickdraft.errors import BadParameter, UnsupportedError
from quickdraft.types import SamplingParams, Speculation


@pytest.mark.parametrize("fields", [{"stop": "end"}, {"speculation": "lookup"}, {"top_p": 0}, {"seed": 1.5}])
def test_wrong_fields_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match=f"'{next(iter(fields))}'"):
        SamplingParams(**fields)


def test_require_names_the_source_that_is_missing() -> None:
    Speculation.parse("lookup@4").require(["lookup"])
    Speculation.parse("auto").require([])
    with pytest.raises(UnsupportedError, match=r"'mtp'.*got 'lookup\+mtp'; expected sources among lookup"):
        Speculation.parse("lookup+mtp").require(["lookup"])
