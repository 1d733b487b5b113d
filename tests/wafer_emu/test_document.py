"""The JSON document: what goes in comes out, and nothing that JSON lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wafer_emu.document import document, plain, text
from wafer_kernels.errors import CapacityError, WaferError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, width=64),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
).filter(lambda value: "inf" not in repr(value))


@settings(max_examples=60, deadline=None)
@given(JSON)
def test_plain_values_survive_the_text(value: Any) -> None:
    assert json.loads(text(document("run", {"value": value})))["result"]["value"] == value


def test_numpy_and_other_kinds_become_plain() -> None:
    value = {
        "cycles": np.int64(2**62 + 1),
        "share": np.float32(0.5),
        "parts": np.arange(4, dtype=np.int64).reshape(2, 2),
        "holds": np.bool_(True),
        "pair": (1, 2),
        "file": Path("runs") / "a.h5",
        3: "a key that is no text",
    }
    found = plain(value)
    assert found == {
        "cycles": 2**62 + 1,
        "share": 0.5,
        "parts": [[0, 1], [2, 3]],
        "holds": True,
        "pair": [1, 2],
        "file": "runs/a.h5",
        "3": "a key that is no text",
    }
    assert type(found["cycles"]) is int
    assert found["holds"] is True


def test_undefined_is_null() -> None:
    undefined = [float("nan"), float("inf"), -float("inf"), np.float64("nan"), np.array([np.nan])]
    assert plain(undefined) == [None, None, None, None, [None]]


def test_what_json_has_no_form_for_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON for object"):
        plain(object())


def test_an_error_keeps_its_details() -> None:
    error = CapacityError("it does not fit", core=[3, 4], short_bytes=np.int64(7), kind="other")
    made = json.loads(text(document("run", error=error)))
    assert made == {
        "schema_version": 1,
        "command": "run",
        "error": {
            "kind": "CapacityError",
            "message": "it does not fit",
            "core": [3, 4],
            "short_bytes": 7,
        },
    }


def test_no_command_is_null_and_an_interrupt_has_its_own_kind() -> None:
    made = document(None, error=WaferError("stopped"), kind="KeyboardInterrupt")
    assert made["command"] is None
    assert made["error"] == {"kind": "KeyboardInterrupt", "message": "stopped"}


def test_the_text_is_ascii() -> None:
    assert text(document("run", {"name": "µs ✓"})).isascii()
