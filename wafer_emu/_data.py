"""Where the shipped data is: presets and published figures."""

from __future__ import annotations

import difflib
from pathlib import Path

from wafer_kernels.errors import ConfigError, FileError

__all__ = ["data_folder", "preset_names", "preset_path"]


def data_folder() -> Path:
    """Folder of the shipped data: inside the wheel, or beside the packages of a checkout.

    Raises
    ------
    FileError
        If the installation has neither.
    """
    package = Path(__file__).parent
    shipped = package / "_data"
    if shipped.is_dir():
        return shipped
    checkout = package.parent
    # Without the guard, a wheel without its data would read whatever is called "data" beside it.
    if (checkout / "pyproject.toml").is_file() and (checkout / "data").is_dir():
        return checkout / "data"
    raise FileError(f"the data of wafer-emu is missing at {shipped}: install the package again")


def preset_names(kind: str, suffix: str) -> list[str]:
    """Names of the presets of a kind (``wafers``, ``models``), sorted."""
    return sorted(path.stem for path in (data_folder() / kind).glob(f"*{suffix}"))


def preset_path(kind: str, suffix: str, name: str) -> Path:
    """File of one preset.

    Raises
    ------
    ConfigError
        If there is no such preset; the nearest names are in the message.
    """
    names = preset_names(kind, suffix)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"no preset {name!r} among the {kind}: {guess}there are {', '.join(names)}",
            name=name,
            near=near,
            known=names,
        )
    return data_folder() / kind / f"{name}{suffix}"
