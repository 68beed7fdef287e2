"""Folders on the Hugging Face hub: what is sent of a run, a dataset or a policy, and what is refused."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unicodedata import normalize

import msgspec

from harness1.data import beir
from harness1.data.beir import CORPUS, QRELS, QUERIES
from harness1.data.benchmarks import BENCHMARKS
from harness1.data.dataset_cache import Progress
from harness1.data.origins import UNKNOWN, origins_of
from harness1.data.tables import pieces
from harness1.data.walk import Walk
from harness1.episodes.single import ASKED
from harness1.errors import MALFORMED, InfrastructureFault, SchemaError, UsageError, optional
from harness1.model_folder import ADAPTER_CONFIG, base_name
from harness1.models.checkpoint import CHECKPOINT, read_checkpoint
from harness1.plain import HIDDEN, find_key, unescaped, utf8_safe, without_secrets
from harness1.records import Task
from harness1.runs.files import STAGE, Stage, read_stage
from harness1.runs.folder import CONFIG, DERIVED, METRICS, PROVENANCE, RESOURCES, SUBMISSIONS
from harness1.runs.journal import EPISODES, TOKENS, check_lines, read_lines
from harness1.sft.data_card import CARD, HELD_OUT, README, TRAIN
from harness1.training.log import LOG

OVERLAP, BLOCK = 4096, 1 << 20
"""Bytes that are looked at twice where a file is read in blocks, so that no key is cut; and bytes of a block."""
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh91AY&SY", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""How files of gzip, zip, bzip2, xz and Zstandard begin."""
HEADER = 1 << 27  # the most bytes of a header of weights that are looked at
LICENCES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")


class Kind(NamedTuple):
    """A kind of folder, the kind of repository that it becomes, and patterns of the files that are sent: of our `own`,
    in which nothing may look like a key, and of those with words of `others`, who may speak of keys."""

    name: str
    repository: Literal["dataset", "model"]
    own: tuple[str, ...]
    others: tuple[str, ...]


_SAID = (METRICS, RESOURCES, CONFIG, PROVENANCE)
_PLAYED = tuple(name for name in DERIVED if name not in _SAID)
_OWN = (STAGE, README, *LICENCES)
_RECORDS = (EPISODES, TOKENS, *_PLAYED, *(f"{folder}/run_*.json" for folder in SUBMISSIONS))
RUN = Kind("run", "dataset", (*_OWN, *_SAID), _RECORDS)
ROWS = Kind("dataset of rows", "dataset", (*_OWN, CARD), (TRAIN, HELD_OUT))
_TEXTS = (*(f"{name}{end}" for name in (CORPUS, QUERIES) for end in ("", ".gz")), f"{QRELS}/*.tsv", f"{QRELS}/*.tsv.gz")
DATASET = Kind("dataset", "dataset", _OWN, _TEXTS)
POLICY = Kind(
    "policy",
    "model",
    (
        *(*_OWN, CHECKPOINT, ADAPTER_CONFIG, CONFIG, LOG, f"data_{CARD}", f"data_{README}"),
        *("config.json", "generation_config.json", "chat_template.jinja", "model.safetensors.index.json"),
    ),
    (
        *("adapter_model.safetensors", "model.safetensors", "model-*-of-*.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    ),
)


class Parcel(NamedTuple):
    """What is sent of a folder: its kind, and the names of the files below it that go and that stay."""

    folder: Path
    kind: Kind
    files: tuple[str, ...]
    left: tuple[str, ...]


def pack(folder: Path, *, own_questions: bool = False, watch: Progress = lambda *_: None) -> Parcel:
    """Return what would be sent of a folder. Raise UsageError if it is no finished run, dataset or policy; it was made
    of what must not be published; no card tells of what, or its questions are no tasks of a dataset, unless
    `own_questions` says that the sender may publish them; or a file holds what looks like a key. SchemaError: a run was
    changed after it had ended. `watch`: called with what is done, the bytes done, and their sum (0 if unknown)."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    stage = read_stage(folder)
    kind = _kind_of(folder, stage)
    if stage is not None and stage.status != "finished":
        raise UsageError(f"{folder} is not finished: run the command that writes it again, which goes on")
    _refuse_origins(folder, own_questions)
    if kind is RUN:
        _refuse_asked(folder, own_questions)
    odd = list[str]()  # what is no regular file, leads out of the folder or is too deep
    names = sorted(Walk(folder, lambda name, why: odd.append(name), everything=True).files())
    files = tuple(name for name in names if _is_sent(folder, name, (*kind.own, *kind.others)))
    for name in files:
        _refuse_keys(folder / name, strict=_matches(name, kind.own), watch=watch)
    left = sorted({*names, *odd} - {*files})
    return Parcel(folder, kind, files, tuple(map(utf8_safe, left)))


def send(parcel: Parcel, to: str, *, public: bool = False, endpoint: str | None = None) -> dict[str, str]:
    """Make the repository OWNER/NAME if there is none, upload the files as one change, and return its `url` and
    `commit`; unless `public`, one that is public is refused. `endpoint` is the hub's address, None that of its client,
    as is the token. Raises MissingExtra: huggingface_hub is not installed; UsageError: the hub refuses, the repository
    is public, or a file holds the token; InfrastructureFault: the hub cannot be reached."""
    with optional("hub", "huggingface-hub"):
        import httpx
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HfHubHTTPError
    api, kind, token = HfApi(endpoint=endpoint), parcel.kind.repository, get_token() or ""
    for name in parcel.files:
        if token and _holds(parcel.folder / name, token.encode()):
            raise UsageError(f"{parcel.folder / name} holds the hub's token: take it out first")

    def describe(error: Exception) -> str:
        text = " ".join(str(error).split())
        return without_secrets(text.replace(token, HIDDEN) if token else text)

    try:
        url = str(api.create_repo(to, repo_type=kind, private=not public, exist_ok=True))
        if not public and not api.repo_info(to, repo_type=kind).private:
            raise UsageError(f"{to} is public on the hub: give --public, or choose another --to")
        done = api.upload_folder(
            repo_id=to,
            folder_path=parcel.folder,
            repo_type=kind,
            commit_message=f"Upload a {parcel.kind.name} of harness1",
            allow_patterns=[glob.escape(name) for name in parcel.files],
        )
    except HfHubHTTPError as error:
        fault: Any = InfrastructureFault if error.response.status_code >= 500 else UsageError
        raise fault(f"the hub does not take {to}: {describe(error)}") from error
    except (httpx.HTTPError, ConnectionError) as error:
        raise InfrastructureFault(f"the hub cannot be reached: {describe(error)}") from error
    except ValueError as error:  # the name of the repository, or the front matter of README.md
        raise UsageError(f"the hub's client does not take {to}: {describe(error)}") from error
    return {"url": url, "commit": str(done.oid)}


def _kind_of(folder: Path, stage: Stage | None) -> Kind:
    if stage is not None and stage.verb == "run":
        return RUN
    if stage is not None and stage.verb == "sft build":
        return ROWS
    if (folder / CHECKPOINT).is_file() or (folder / ADAPTER_CONFIG).is_file():
        card = read_checkpoint(folder)
        if card is not None and card.remote:
            raise UsageError(f"the weights of {folder} are with a training service, not in the folder")
        if not (folder / README).is_file():
            raise UsageError(f"{folder} has no {README}: say there what the policy is, for the hub's page")
        return POLICY
    if beir.is_beir(folder):
        return DATASET
    raise UsageError(f"{folder} is no run, no dataset in BEIR layout or of `sft build`, and no policy")


def _is_sent(folder: Path, name: str, patterns: Sequence[str]) -> bool:
    if any(part.startswith(".") for part in Path(name).parts) or name != utf8_safe(name):
        return False
    return (folder / name).resolve().is_relative_to(folder.resolve()) and _matches(name, patterns)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # `*` of a pattern stays within its folder.
    return any(fnmatchcase(name, each) and name.count("/") == each.count("/") for each in patterns)


_NAMED = re.compile(
    r"""(?ix)
    (?: (?<!primary|foreign) (?<!sort) (?<!cache) [-_]key | (?<!(?<![a-z])(?:per|pad|bos|eos|unk)[-_\ ]) token
      | secret | passw(?:or)?d ) ["']? \s* [:=] \s* ["']?
      (?=[^\s"']{0,99}\d) (?=[^\s"']{0,99}[a-z]) [\w./+=-]{6,}
    | \b key \s* = \s* ["'] [^"'\s]{6,}
    | ://[^/\s:@"']*:[^/\s@"']+@ | ://(?=[^/\s@"']*\d)[^/\s:@"']{16,}@
    """
)
"""A value with letters and digits after what may be the name of a key, or a password or token in an address."""


def _refuse_keys(path: Path, *, strict: bool, watch: Progress = lambda *_: None) -> None:
    """Refuse a file that holds a key, or, where it is `strict`, what might be one."""
    if find_key(path.name.encode()) is not None:
        raise UsageError(f"the name of {path} holds what looks like a key: give it another")
    line, done, size = 1, 0, 0 if path.suffix == ".gz" else path.stat().st_size
    for before, block in _texts(path):
        text = unescaped(before + block)
        if (found := find_key(text, goes_on=bool(before))) is None and strict:
            found = _find_resemblance(text.decode("utf-8", "replace"))
        if found is not None:
            number = line - before.count(b"\n") + text.count(b"\n", 0, found)
            raise UsageError(f"{path}:{number} holds what looks like a key: take it out first")
        if not before and block.startswith(PACKED):
            raise UsageError(f"{path} holds a packed file, in which no key would be found: put its content there")
        line += block.count(b"\n")
        done += len(block)
        watch(f"searching {path.name} for keys", done, size)


def _find_resemblance(text: str) -> int | None:
    """Return the place of what might be a key, or None."""
    if named := _NAMED.search(text):
        return named.start()
    shown = without_secrets(text)
    differing = (at for at, pair in enumerate(zip(text, shown, strict=False)) if len(set(pair)) > 1)
    return next(differing, 0) if shown != text else None


def _texts(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield the blocks of a file, unpacked, each with the end of the one before; of weights the header."""
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            yield b"", file.read(min(int.from_bytes(file.read(8), "little"), HEADER))
        return
    before = b""
    for block in pieces(path, lambda file: file.read(BLOCK)):
        yield before, block
        before = block[-OVERLAP:]


def _holds(path: Path, word: bytes) -> bool:
    return word in path.name.encode() or any(word in unescaped(before + block) for before, block in _texts(path))


SECRET = tuple(name for name, each in BENCHMARKS.items() if each.secret_answers)


def _refuse_origins(folder: Path, own: bool) -> None:
    places = [folder]
    with suppress(OSError, ValueError, RuntimeError):  # a base that is no path, or of nobody known
        if (base := folder / Path(base_name(folder)).expanduser()).is_dir():
            places.append(base)
    origins = origins_of(*places)
    for origin in origins:
        # A folder without a card may say what it is by its name, and so may the hub's copy of a benchmark.
        if secret := next((each for each in SECRET if _letters(each) in _letters(origin)), ""):
            raise UsageError(f"{folder} comes from {secret}, whose questions and answers must not be published")
    if not own and (unknown := [each.removeprefix(UNKNOWN) for each in origins if each.startswith(UNKNOWN)]):
        raise UsageError(
            f"no card says where {', '.join(unknown)} comes from: whether {folder} may be published cannot be checked."
            " Make it again by this version from what has a card, with --force if it is there, or give --own-questions"
            " if all of it is yours to publish"
        )


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, normalize("NFKC", name).casefold()))


def _refuse_asked(folder: Path, own: bool) -> None:
    """Refuse a run that was changed, or whose questions are not all tasks of a dataset, unless they are one's own:
    whoever asked them knows where they come from."""
    path = folder / EPISODES
    for number, line in check_lines(path, read_lines(path)) if path.is_file() else ():
        try:
            task = msgspec.json.decode(line, type=_Line).task
        except MALFORMED as error:
            raise SchemaError(f"{path}:{number}: {error}") from error
        if task.split == ASKED and not own:
            raise UsageError(
                f"{folder} holds a question that is no task of its dataset ({task.task_id}): whether it may be"
                " published cannot be checked; give --own-questions if it is yours to publish"
            )


class _Line(msgspec.Struct):
    task: Task
