"""Write files whole or not at all, lock them, turn the errors of folders and disks into words, and keep `stage.json`,
the card of a folder: what a verb wrote there, from what, and whether it finished."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import msgspec

from harness1.config import present_tree
from harness1.errors import MALFORMED, SchemaError, UsageError
from harness1.plain import decode_plain

T = TypeVar("T")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn every `OSError` inside this context into a `UsageError` that names the file or the folder."""
    try:
        yield
    except OSError as error:
        reason = "no space left on its disk" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise UsageError(f"{error.filename or folder}: {reason}") from error


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Refuse a folder, which need not exist yet, if its disk has fewer than `needed` bytes free. Raises UsageError."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UsageError(f"no space left for {folder}: it takes about {needed / 1e6:,.0f} MB of {free / 1e6:,.0f} free")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that readers, even after a crash, find either the old bytes or the new ones."""
    with replacing(path) as file:
        file.write(data)


def write_json(path: Path, value: object) -> None:
    """Replace a file, as `write_atomically` does, with a value as indented JSON."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON. Raises SchemaError: it is no object, no JSON, or no plain file."""
    if path.exists() and not path.is_file():
        raise SchemaError(f"{path} is no file")
    try:
        return msgspec.convert(decode_plain(path.read_bytes()), dict[str, Any])
    except MALFORMED as error:
        raise SchemaError(f"{path} is damaged: {error}") from error


def find_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file of JSON; None if there is none, or it is damaged."""
    try:
        return read_json(path)
    except (OSError, SchemaError):
        return None


def read_record(path: Path, kind: type[T], what: str) -> T | None:
    """Return the record in a file of JSON, or None if there is none. Raises SchemaError: it is not `what`."""
    if not path.is_file():
        return None
    try:
        decode_plain(data := path.read_bytes())
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise SchemaError(f"{path} is not {what}: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` in one step once it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def lock(file: IO[Any], refusal: str, on_wait: Callable[[], None] | None = None) -> None:
    """Lock a file until it is closed or this process dies; if it is held, wait after `on_wait`, or raise UsageError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if on_wait is None:
            raise UsageError(refusal) from error
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)


STAGE = "stage.json"
TASK_HASHES = ("queries", "gold")  # inputs of a run that follow from its tasks


class Stage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The card of a folder. `inputs` decide what the verb does: equal inputs and a finished status mean done. `origins`
    tell what the folder was made of (see `data.origins`); cards of earlier versions have none."""

    verb: str
    inputs: dict[str, Any]
    status: Literal["running", "finished", "interrupted"] = "running"
    hashes: dict[str, str] = {}
    gates: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    origins: tuple[str, ...] = ()

    def is_done(self, folder: Path) -> bool:
        """Return whether the folder already holds the same work, finished."""
        found, wanted = read_stage(folder), (self.verb, self.inputs, "finished")
        return found is not None and (found.verb, found.inputs, found.status) == wanted

    def write(self, folder: Path, **changes: Any) -> Stage:
        """Write the card with changes, in one step, and return it."""
        stage = msgspec.structs.replace(self, **changes)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STAGE, stage)
        return stage


def read_stage(folder: Path) -> Stage | None:
    """Return the card of a folder, its configuration as this version spells it, or None; SchemaError if damaged."""
    stage = read_raw_stage(folder)
    if stage is None or not isinstance(config := stage.outputs.get("config"), dict):
        return stage
    return msgspec.structs.replace(stage, outputs={**stage.outputs, "config": present_tree(config)})


def read_raw_stage(folder: Path) -> Stage | None:
    """Return the card of a folder as it was written; otherwise as `read_stage`."""
    return read_record(folder / STAGE, Stage, "a stage card")


@contextmanager
def under_way(stage: Stage, folder: Path) -> Iterator[None]:
    """Write a card that says `running` during the work inside, and `interrupted` if it is cut short."""
    with writing(folder):
        stage.write(folder)
        try:
            yield
        except BaseException:
            with suppress(OSError):  # the error is what to report; a card that says `running` is resumed as well
                stage.write(folder, status="interrupted")
            raise


def refuse_foreign(folder: Path, verb: str, what: str = "", mark: str = STAGE, option: str = "--out") -> None:
    """Raise UsageError unless a folder, named by `option`, is new, empty, or was written by the same verb. `what`: a
    foreign folder holds, in words. `mark`: a file that shows which verb a folder belongs to before it has a card."""
    try:
        # A process that was killed while it wrote its card left the card's temporary file.
        empty = not folder.exists() or all(each.name.startswith(f".{STAGE}.") for each in folder.iterdir())
    except OSError as error:
        raise UsageError(f"{folder} cannot be written to: {error.strerror}") from error
    found = None if empty else read_stage(folder)
    if not empty and (found.verb != verb if found else not (folder / mark).is_file()):
        what = what or f"nothing of `harness1 {verb}`"
        raise UsageError(f"{folder} is not empty and holds {what}: choose another {option}")


def refuse_changed(
    stage: Stage, folder: Path, noun: str, choice: str = "--out, or --force", besides: Collection[str] = ()
) -> None:
    """Raise UsageError if a folder has a card of other inputs, which it names; an earlier version's lacks the hashes of
    tasks. `noun`: names what the folder holds. `choice`: the options to change. `besides`: inputs that may differ."""
    found = read_stage(folder)
    if found is None or found.inputs == stage.inputs:
        return
    names = [name for name in stage.inputs if found.inputs.get(name) != stage.inputs[name]]
    unknown = {name for name in TASK_HASHES if "tasks" in names or name not in found.inputs}
    names = [name for name in names if name not in unknown and name not in besides]
    if names or found.inputs.keys() - stage.inputs.keys():
        raise UsageError(f"{folder} holds another {noun} (it differs in {', '.join(names)}): choose another {choice}")


def refuse_other(stage: Stage, folder: Path, noun: str) -> None:
    """Raise UsageError unless a folder is new, empty, or was made by the same work, which `noun` names."""
    refuse_foreign(folder, stage.verb)
    refuse_changed(stage, folder, noun)


def clear(folder: Path, verb: str, *patterns: str, keep_card: bool = False) -> None:
    """Remove what a verb wrote into a folder, as `remove` does. Raises UsageError: the folder holds something else."""
    refuse_foreign(folder, verb)
    remove(folder, *patterns, keep_card=keep_card)


def remove(folder: Path, *patterns: str, keep_card: bool = False) -> None:
    """Remove the files and folders that match, and the card last: without it, the rest of a clearing that was cut short
    would belong to nobody. Raises UsageError: the folder cannot be cleared."""
    try:
        for path in [path for pattern in patterns for path in folder.glob(pattern) if path.name != STAGE]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not keep_card:
            (folder / STAGE).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be removed: {error.strerror}") from error
