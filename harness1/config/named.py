"""Configurations by name: those that come with the package, such as `small` and `sft/small`."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"


def shipped() -> dict[str, Path]:
    """Return the files of the configurations that come with the package, by name."""
    files = sorted(SHIPPED.rglob("*.toml"), key=lambda file: (len(file.parts), file))
    return {file.relative_to(SHIPPED).with_suffix("").as_posix(): file for file in files}


def config_file(named: Path | str) -> Path:
    """Return the file of a configuration that comes with the package, or else the path itself.

    A name goes first, so that it means the same in every folder; a file of that name is written `./small`.
    """
    return shipped().get(str(named), Path(named))


def unknown_config(named: Path | str) -> str:
    """Return what to tell a user whose configuration is neither a file nor a name."""
    names, stem = shipped(), Path(named).as_posix().removesuffix(".toml")
    parts = stem.split("/")
    ends = ["/".join(parts[at:]) for at in range(len(parts))]
    near = [end for end in ends if end in names] or get_close_matches(stem, names, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"there is no configuration {named}: give a TOML file, or one of {', '.join(names)}{meant}"


def opening(file: Path) -> str:
    """Return the first sentence of the comment that a configuration begins with."""
    words: list[str] = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("# ").split()
    return " ".join(words).partition(". ")[0].rstrip(".") + "."
