"""The emulator held against published measurements and independent oracles, case by case.

A case is *calibrated* if a constant was fitted to it, *predicted* if nothing was, *exact* if an
integer must come out.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wafer_emu._data import data_folder
from wafer_kernels.errors import UsageError

__all__ = ["SUITES", "Case", "Progress", "Role", "Suite", "published", "validate"]

Role = Literal["calibrated", "predicted", "exact"]
Progress = Callable[[str, float], None]

SUITES = (
    "systolic",
    "collectives",
    "noc-latency",
    "waferllm-prefill",
    "wse3-chunked-prefill",
    "pipeline-identity",
    "sram-footprint",
)


@dataclass(frozen=True)
class Case:
    """One figure: what others found and what the emulator says."""

    case: str
    reference: float
    emulated: float
    role: Role

    @property
    def relative_error(self) -> float:
        """(emulated - reference) / reference."""
        return (self.emulated - self.reference) / self.reference


@dataclass(frozen=True)
class Suite:
    """Cases of one kind, all in one ``unit``; ``source`` of the references; what to know."""

    name: str
    unit: str
    source: str
    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()

    @property
    def mean_absolute_relative_error(self) -> float:
        """Mean of the cases' absolute relative errors."""
        return sum(abs(case.relative_error) for case in self.cases) / len(self.cases)

    @property
    def max_absolute_relative_error(self) -> float:
        """Largest of them."""
        return max(abs(case.relative_error) for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping, as the JSON document has it."""
        return {
            "name": self.name,
            "unit": self.unit,
            "source": self.source,
            "notes": list(self.notes),
            "cases": [{**vars(case), "relative_error": case.relative_error} for case in self.cases],
            "mean_absolute_relative_error": self.mean_absolute_relative_error,
            "max_absolute_relative_error": self.max_absolute_relative_error,
        }


def published(table: str) -> list[dict[str, str]]:
    """Rows of a shipped table of published figures."""
    with (data_folder() / "published" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def validate(
    names: Sequence[str] = SUITES, progress: Progress = lambda what, share: None
) -> Iterable[Suite]:
    """Emulate the cases of the named suites, one suite after another.

    Raises
    ------
    UsageError
        If there is no suite of a name.
    """
    from wafer_emu import validate_kernels, validate_runs

    makers: dict[str, Callable[[], Suite]] = {
        "systolic": validate_kernels.systolic,
        "collectives": validate_kernels.collectives,
        "noc-latency": validate_kernels.noc_latency,
        "waferllm-prefill": validate_runs.waferllm_prefill,
        "wse3-chunked-prefill": validate_runs.wse3_chunked_prefill,
        "pipeline-identity": validate_kernels.pipeline_identity,
        "sram-footprint": validate_runs.sram_footprint,
    }
    for name in names:
        if name not in makers:
            raise UsageError(f"no suite {name!r}: there are {', '.join(SUITES)}")
    for index, name in enumerate(names):
        progress(name, index / len(names))
        yield makers[name]()
