"""The run file: registry, recorder, reader."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wafer_emu.recorder import Recorder
from wafer_emu.seal import SEAL_BYTES
from wafer_emu.sink import Sink
from wafer_emu.state import (
    ATTRIBUTES,
    CLASSES,
    SCHEMA_VERSION,
    TABLES,
    VARIABLES,
    group_variables,
    open_run,
    register,
    validate_run,
)
from wafer_kernels.errors import FileError, KernelError

ROWS, COLUMNS, SRAM_BYTES = 3, 5, 49_152
ATTRIBUTE_VALUES = {
    "title": "a run",
    "history": "made by a test",
    "configuration": {"wafer": {"name": "tiny"}},
    "summary": {"makespan_cycles": 30},
    "seed": 7,
    "provenance": {"core": "assumed: a test"},
}
RUN_KEYS = [
    "makespan_cycles",
    "makespan_seconds",
    "time_to_first_token_seconds",
    "requests_per_second",
    "tokens_per_second",
    "bubble_fraction",
    "stage_busy_fraction",
    "chunk_tokens",
    "chunk_cycles",
    "sram_peak_bytes_per_core",
    "sram_capacity_bytes_per_core",
    "kv_peak_bytes_per_stage",
    "kv_capacity_bytes_per_stage",
    "reallocated_bytes",
    "remote_read_bytes",
    "noc_byte_hops",
    "links",
    "stall_cycles",
    "energy_joules",
    "macs",
    "settings",
]
SHARED_FILE = [HealthCheck.function_scoped_fixture]
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows_of(group: str, count: int, first: int = 0) -> dict[str, np.ndarray]:
    """Return distinct values for every column of a table."""
    numbers = np.arange(first, first + count)
    return {name: numbers * 31 + k for k, name in enumerate(group_variables(group))}


def planes_at(frame: int) -> np.ndarray:
    shape = (len(CLASSES), ROWS, COLUMNS)
    return np.arange(np.prod(shape)).reshape(shape) * 500 + frame


def write(path: Path, **attributes: object) -> Path:
    """Write a small complete run."""
    with Recorder(path, rows=ROWS, columns=COLUMNS, sram_bytes=SRAM_BYTES) as recorder:
        for frame in range(3):
            busy = np.full((ROWS, COLUMNS), frame / 4)
            recorder.frame(10 * frame + 10, planes_at(frame), busy)
        for group in TABLES:
            recorder.table(group, rows_of(group, 4))
        peak = planes_at(2).sum(axis=0) // len(CLASSES)
        recorder.peaks(peak, np.full((ROWS, COLUMNS), 2**40))
        recorder.finish(ATTRIBUTE_VALUES | attributes)
    return path


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return write(tmp_path / "a run.h5")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_variable_registers_once() -> None:
    variable = VARIABLES["tasks", "tokens"]
    with pytest.raises(KernelError, match="tasks/tokens is registered twice"):
        register([variable, variable])


def test_every_variable_has_units_and_words() -> None:
    assert {variable.units for variable in VARIABLES.values()} == {"1", "byte"}
    assert all(variable.long_name for variable in VARIABLES.values())
    for group, name in VARIABLES:
        assert (VARIABLES[group, name].units == "byte") == name.endswith("bytes")


@pytest.mark.parametrize("variable", VARIABLES.values(), ids=lambda v: f"{v.group}.{v.name}")
def test_docs_show_every_variable(variable) -> None:
    meaning = variable.long_name + "".join(f"; {v}: {word}" for v, word in variable.flags or ())
    cells = (", ".join(variable.dims), variable.dtype, variable.units, meaning)
    anchor = f'<a id="{variable.group}.{variable.name}"></a>`{variable.name}`'
    assert f"| {anchor} | {' | '.join(cells)} |\n" in DOCS.read_text()


def test_docs_show_every_attribute() -> None:
    for a in ATTRIBUTES:
        row = f'| <a id="attribute.{a.name}"></a>`{a.name}` | {a.kind} | {a.meaning} |\n'
        assert row in DOCS.read_text()


@pytest.mark.parametrize("key", RUN_KEYS)
def test_docs_define_every_key_of_run(key: str) -> None:
    assert DOCS.read_text().count(f'<a id="{key}"></a>`{key}`') == 1


def test_what_was_written_is_read(run_path: Path) -> None:
    with open_run(run_path) as tree:
        state = tree["state"]
        assert state["time"].values.tolist() == [10, 20, 30]
        assert tuple(state["class"].values) == CLASSES
        for frame in range(3):
            assert np.array_equal(state["sram_bytes"][frame], planes_at(frame))
            assert (state["busy_fraction"][frame] == frame / 4).all()
        assert int(state["sram_bytes"].sel({"class": "own_kv", "row": 1, "time": 30}).max()) == (
            planes_at(2)[CLASSES.index("own_kv"), 1].max()
        )
        assert (state["sram_peak_cycle"] == 2**40).all()
        for group in TABLES:
            for name, values in rows_of(group, 4).items():
                assert np.array_equal(tree[group][name], values)
        assert tree.attrs["complete"] == 1
        assert json.loads(tree.attrs["summary"]) == ATTRIBUTE_VALUES["summary"]
        assert json.loads(tree.attrs["versions"])["numpy"] == np.__version__


def test_xarray_reads_it_without_our_code(run_path: Path) -> None:
    code = """
import json, sys, xarray
tree = xarray.open_datatree(sys.argv[1])
facts = {}
for group in tree.groups:
    for name, variable in tree[group].variables.items():
        variable.load()
        attrs = variable.attrs
        facts[f"{group[1:]}/{name}"] = [str(variable.dtype), attrs["units"], attrs["long_name"]]
assert not [name for name in sys.modules if name.startswith(("wafer", "mocap"))]
print(json.dumps(facts))
"""
    answer = python(code, run_path)
    assert answer.returncode == 0, answer.stderr
    facts = json.loads(answer.stdout)
    assert facts.keys() == {f"{group}/{name}" for group, name in VARIABLES}
    for (group, name), variable in VARIABLES.items():
        dtype, units, long_name = facts[f"{group}/{name}"]
        assert (units, long_name) == (variable.units, variable.long_name)
        assert dtype == variable.dtype or variable.dtype in {"unsigned", "str"}
    assert facts["state/sram_bytes"][0] == "uint16"


def test_integers_have_no_fill_value(run_path: Path) -> None:
    with h5py.File(run_path) as raw:
        for group, name in VARIABLES:
            assert "_FillValue" not in raw[group][name].attrs
        assert raw["kv_blocks/moved_cycle"].attrs["flag_meanings"] == "never"


def test_one_plane_is_one_chunk(run_path: Path) -> None:
    with h5py.File(run_path) as raw:
        assert raw["state/sram_bytes"].chunks == (1, 1, ROWS, COLUMNS)
        assert raw["state/busy_fraction"].chunks == (1, ROWS, COLUMNS)
        assert raw["state/sram_bytes"].compression == "gzip"


@pytest.mark.parametrize(
    ("sram_bytes", "dtype"),
    [(255, "uint8"), (256, "uint16"), (65_535, "uint16"), (2**20, "uint32")],
)
def test_narrowest_type_holds_a_full_core(tmp_path: Path, sram_bytes: int, dtype: str) -> None:
    path = tmp_path / "run.h5"
    with Recorder(path, rows=1, columns=1, sram_bytes=sram_bytes) as recorder:
        full = np.full((len(CLASSES), 1, 1), sram_bytes)
        recorder.frame(0, full, np.ones((1, 1)))
        recorder.peaks(full[0], full[0])
        recorder.finish(ATTRIBUTE_VALUES)
    with h5py.File(path) as raw:
        for name in ("sram_bytes", "sram_peak_bytes"):
            assert raw["state"][name].dtype == dtype
            assert (raw["state"][name][...] == sram_bytes).all()


@settings(max_examples=20, deadline=None)
@given(pieces=st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_a_table_in_pieces_is_the_whole_table(tmp_path_factory, pieces: list[int]) -> None:
    path = tmp_path_factory.mktemp("pieces") / "run.h5"
    with Recorder(path, rows=1, columns=1, sram_bytes=100) as recorder:
        first = 0
        for piece in pieces:
            recorder.table("tasks", rows_of("tasks", piece, first))
            first += piece
        recorder.finish(ATTRIBUTE_VALUES)
    with h5py.File(path) as raw:
        for name, values in rows_of("tasks", sum(pieces)).items():
            assert np.array_equal(raw["tasks"][name], values)


def test_tables_cross_chunks_and_documents_pass_64_kilobytes(tmp_path: Path) -> None:
    long = {"chunk_tokens": list(range(30_000))}
    path = tmp_path / "run.h5"
    with Recorder(path, rows=1, columns=1, sram_bytes=100) as recorder:
        recorder.table("stages", rows_of("stages", 50_000))
        recorder.table("stages", rows_of("stages", 50_000, 50_000))
        recorder.finish(ATTRIBUTE_VALUES | {"summary": long})
    with open_run(path) as tree:
        values = rows_of("stages", 100_000)["kv_peak_bytes"]
        assert np.array_equal(tree["stages/kv_peak_bytes"], values)
        assert json.loads(tree.attrs["summary"]) == long


def test_memory_does_not_grow_with_frames(tmp_path: Path) -> None:
    planes = np.ones((len(CLASSES), 200, 200), np.int64)
    busy = np.ones((200, 200))
    with Recorder(tmp_path / "run.h5", rows=200, columns=200, sram_bytes=SRAM_BYTES) as recorder:
        recorder.frame(1, planes, busy)
        tracemalloc.start()
        for cycle in range(2, 22):
            recorder.frame(cycle, planes, busy)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    frame_bytes = planes.size * 2 + busy.size * 4
    assert peak < 3 * frame_bytes


def test_what_is_unfinished_is_removed_and_the_older_file_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "run.h5")
    before = path.read_bytes()
    recorder = Recorder(path, rows=ROWS, columns=COLUMNS, sram_bytes=SRAM_BYTES)

    def broken_run() -> None:
        with recorder:
            recorder.frame(1, planes_at(0), np.ones((ROWS, COLUMNS)))
            assert Path(f"{path}.partial").exists()
            raise RuntimeError("the run broke")

    with pytest.raises(RuntimeError, match="the run broke"):
        broken_run()
    assert path.read_bytes() == before
    assert names_in(tmp_path) == ["run.h5"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests themselves run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_inside_a_write_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, write_bytes = signal.getsignal(signal.SIGINT), Sink.write
    written = []

    def interrupted(self, data) -> int:
        signal.raise_signal(signal.SIGINT)
        written.append(write_bytes(self, data))
        return written[-1]

    def interrupted_run() -> None:
        path = tmp_path / "run.h5"
        with Recorder(path, rows=ROWS, columns=COLUMNS, sram_bytes=SRAM_BYTES) as recorder:
            monkeypatch.setattr(Sink, "write", interrupted)
            try:
                recorder.frame(1, planes_at(0), np.ones((ROWS, COLUMNS)))
            finally:
                monkeypatch.undo()

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    assert len(written) > 1
    assert names_in(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is usual


@pytest.mark.parametrize("limit", [100, 5_000, 40_000, 70_000, 90_000])
def test_a_full_disk_is_one_clear_error(tmp_path: Path, limit: int) -> None:
    pytest.importorskip("resource")
    code = """
import resource, sys
import numpy as np
from wafer_emu.recorder import Recorder
from wafer_kernels.errors import FileError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
noise = np.random.default_rng(0).integers(0, 50_000, (6, 40, 40))
try:
    with Recorder(sys.argv[1], rows=40, columns=40, sram_bytes=60_000) as recorder:
        for cycle in range(10):
            recorder.frame(cycle, noise, noise[0] / 50_000)
except FileError as error:
    print(error.exit_code, error)
"""
    answer = python(code, tmp_path / "run.h5", limit)
    assert answer.returncode == 0
    assert answer.stderr == ""
    assert answer.stdout.startswith(f"2 {tmp_path / 'run.h5'} cannot be written ([Errno 27]")
    assert names_in(tmp_path) == []


def test_a_killed_run_can_be_read_up_to_its_last_frame(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import numpy as np
from wafer_emu.recorder import Recorder
with Recorder(sys.argv[1], rows=2, columns=2, sram_bytes=100) as recorder:
    for cycle in range(5):
        recorder.frame(cycle, np.full((6, 2, 2), cycle), np.ones((2, 2)))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert python(code, tmp_path / "run.h5").returncode == -signal.SIGKILL
    with pytest.warns(UserWarning, match="incomplete"):
        tree = open_run(tmp_path / "run.h5.partial")
    with tree:
        assert tree["state/sram_bytes"][:, 0, 0, 0].values.tolist() == [0, 1, 2, 3, 4]
        assert tree["tasks"].sizes["task"] == 0


@pytest.mark.parametrize("where", ["absent/run.h5", "file/run.h5", "folder"])
def test_an_unwritable_place_is_refused_before_work(tmp_path: Path, where: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / where, rows=1, columns=1, sram_bytes=100)
    with pytest.raises(FileError) as caught:
        recorder.__enter__()
    assert caught.value.exit_code == 2
    assert str(tmp_path / where) in caught.value.message
    assert names_in(tmp_path) == ["file", "folder"]


BUSY = np.ones((ROWS, COLUMNS))
MISUSES = {
    "follows one at 5": lambda r: r.frame(5, planes_at(0), BUSY),
    "state/sram_bytes has shape": lambda r: r.frame(6, planes_at(0)[:1], BUSY),
    "state/busy_fraction has shape": lambda r: r.frame(6, planes_at(0), BUSY[:, :1]),
    "values that uint16 cannot": lambda r: r.frame(6, planes_at(0) - 1, BUSY),
    "sram_bytes holds values": lambda r: r.frame(6, planes_at(0) + 65_536, BUSY),
    "values that int64 cannot": lambda r: r.peaks(planes_at(0)[0], BUSY / 2),
    "not registered: extra": lambda r: r.table("tasks", rows_of("tasks", 2) | {"extra": BUSY[0]}),
    "columns of stages": lambda r: r.table("stages", rows_of("tasks", 2)),
    "values that int32 cannot": lambda r: r.table(
        "tasks", rows_of("tasks", 2) | {"tokens": np.array([1, 2**31])}
    ),
    "differ in length": lambda r: r.table("tasks", rows_of("tasks", 2) | {"tokens": np.array([1])}),
    "attributes, missing": lambda r: r.finish({"title": "t"}),
}


def test_misuse_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    with Recorder(path, rows=ROWS, columns=COLUMNS, sram_bytes=SRAM_BYTES) as recorder:
        recorder.frame(5, planes_at(0), BUSY)
        for message, misuse in MISUSES.items():
            with pytest.raises(KernelError, match=message):
                misuse(recorder)
        recorder.finish(ATTRIBUTE_VALUES)
    with h5py.File(path) as raw:
        assert len(raw["state/sram_bytes"]) == len(raw["state/time"]) == 1
        assert not any(len(raw[group][name]) for group, name in VARIABLES if group in TABLES)
        assert not raw["state/sram_peak_cycle"][...].any()


def test_a_summary_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write(tmp_path / "run.h5", summary={"latency_ratio": float("nan")})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.33, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(run_path: Path, share: float) -> None:
    whole = run_path.read_bytes()
    run_path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(FileError, match=r"truncated|not an HDF5 file"):
        open_run(run_path)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), length=st.integers(1, 9))
def test_any_damage_is_seen(run_path: Path, place: float, flip: int, length: int) -> None:
    whole = run_path.read_bytes()
    first = int(place * (len(whole) - SEAL_BYTES - length))
    damaged = bytes(byte ^ flip for byte in whole[first : first + length])
    copy = run_path.with_suffix(".damaged")
    copy.write_bytes(whole[:first] + damaged + whole[first + length :])
    with pytest.raises(FileError, match="is damaged: its checksum does not match"):
        open_run(copy)


def test_a_file_without_its_seal_still_opens(run_path: Path) -> None:
    run_path.write_bytes(run_path.read_bytes()[:-SEAL_BYTES])
    open_run(run_path).close()


def test_files_that_are_not_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("not HDF5 at all" * 100)
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["data"] = np.arange(5)
    for name, message in (
        ("text.h5", "is not an HDF5 file"),
        ("other.h5", "not a run of wafer-emu"),
        ("absent.h5", "There is no run file"),
        (".", "There is no run file"),
    ):
        with pytest.raises(FileError, match=message) as caught:
            open_run(tmp_path / name)
        assert caught.value.exit_code == 2


def test_another_schema_version_is_refused(run_path: Path) -> None:
    with h5py.File(run_path, "a") as raw:
        raw.attrs["wafer_schema_version"] = 999
    with pytest.raises(FileError, match=r"written by wafer-emu .* schema version 999"):
        open_run(run_path)


def test_what_a_file_holds_changes_with_its_schema_version() -> None:
    """A file that this program cannot read must say so: raise SCHEMA_VERSION, then the digest."""
    variables = [(v.group, v.name, v.dims, v.dtype, v.units) for v in VARIABLES.values()]
    held = [variables, [attribute.name for attribute in ATTRIBUTES], RUN_KEYS]
    digest = hashlib.sha256(json.dumps(held).encode()).hexdigest()[:12]
    assert (SCHEMA_VERSION, digest) == (2, "e01361906dbb")


def spoil_units(raw: h5py.File) -> None:
    raw["tasks/tokens"].attrs["units"] = "furlong"


def spoil_name(raw: h5py.File) -> None:
    raw["stages/kv_peak_bytes"].attrs["long_name"] = ""


def spoil_type(raw: h5py.File) -> None:
    del raw["requests/tokens"]
    made = raw["requests"].create_dataset("tokens", data=np.ones(4, np.float32))
    made.dims[0].attach_scale(raw["requests/request"])


def spoil_document(raw: h5py.File) -> None:
    raw.attrs["summary"] = "{"


def drop_variable(raw: h5py.File) -> None:
    del raw["kv_blocks/bytes"]


def drop_group(raw: h5py.File) -> None:
    del raw["requests"]


def drop_mark(raw: h5py.File) -> None:
    del raw.attrs["complete"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_units, "tasks/tokens has units furlong, not 1"),
        (spoil_name, "stages/kv_peak_bytes has no long_name"),
        (spoil_type, "requests/tokens has type float32, not int32"),
        (spoil_document, "attribute summary is not JSON"),
        (drop_variable, "kv_blocks/bytes is missing"),
        (drop_group, "requests/arrival_cycle is missing"),
        (drop_mark, "attribute complete is missing"),
    ],
)
def test_a_spoilt_run_is_refused_by_name(run_path: Path, spoil, message: str) -> None:
    with h5py.File(run_path, "a") as raw:
        spoil(raw)
    with pytest.raises(FileError, match=message):
        open_run(run_path)


def test_dimensions_are_validated(run_path: Path) -> None:
    with open_run(run_path) as tree:
        turned = xr.DataTree.from_dict(
            {group: tree[group].to_dataset() for group in tree.children}
            | {"state": tree["state"].to_dataset().transpose("time", "class", "column", "row")},
        )
        turned.attrs = tree.attrs
        with pytest.raises(FileError, match="state/sram_bytes has dimensions"):
            validate_run(turned)


def test_heavy_libraries_are_loaded_late() -> None:
    code = """
import sys, wafer_emu.recorder
assert not {"xarray", "h5py", "h5netcdf", "numba", "pandas"} & sys.modules.keys()
"""
    answer = python(code)
    assert answer.returncode == 0, answer.stderr
