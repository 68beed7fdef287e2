"""Folders on the Hugging Face hub: what is sent of a run, a dataset or a policy, and what is refused."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from harness1.data import beir
from harness1.data.benchmarks import BENCHMARKS
from harness1.episodes.single import ASKED
from harness1.errors import MALFORMED, InfrastructureFault, SchemaError, UsageError, optional
from harness1.eval.run import Run
from harness1.model_folder import ADAPTER_CONFIG
from harness1.models.checkpoint import CHECKPOINT, read_checkpoint
from harness1.plain import HIDDEN, without_secrets
from harness1.records import Task
from harness1.runs.files import STAGE, Stage, read_stage
from harness1.runs.folder import CONFIG, PROVENANCE, SUBMISSION
from harness1.runs.journal import EPISODES, TOKENS, read_lines
from harness1.sft.data_card import CARD, HELD_OUT, README, TRAIN, read_card
from harness1.training.log import LOG

DATA_CARD = "data_card.json"
"""The copy of a data card that a checkpoint keeps."""
CARDS = (STAGE, CONFIG, PROVENANCE, CARD, README, CHECKPOINT, ADAPTER_CONFIG, DATA_CARD, "data_README.md")
"""Files in which nothing may look like a key; others hold texts of documents, which may speak of keys."""
BLOCK = 1 << 20


class Kind(NamedTuple):
    """A kind of folder, the kind of repository that it becomes, and patterns of the files that are sent."""

    name: str
    repository: Literal["dataset", "model"]
    patterns: tuple[str, ...]


OUTPUTS = ("*.json", "*.csv", "*.trec", "*.html", f"{SUBMISSION}*/run_*")
RUN = Kind("run", "dataset", (EPISODES, TOKENS, STAGE, CONFIG, PROVENANCE, README, *OUTPUTS))
ROWS = Kind("dataset of rows", "dataset", (TRAIN, HELD_OUT, CARD, README, STAGE))
DATASET = Kind("dataset", "dataset", ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*", README, STAGE, "LICENSE*"))
POLICY = Kind(
    "policy", "model", ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.toml", "*.md", LOG, "LICENSE*")
)


class Parcel(NamedTuple):
    """What is sent of a folder: its kind, and the names of the files below it that go and that stay."""

    folder: Path
    kind: Kind
    files: tuple[str, ...]
    left: tuple[str, ...]


class Sent(NamedTuple):
    """Where a parcel went."""

    url: str
    commit: str


def pack(folder: Path, *, own_questions: bool = False) -> Parcel:
    """Return what would be sent of a folder. Raise UsageError if it is no finished run, dataset or policy; its source
    keeps its answers secret, or cannot be asked whether it does; its questions are no tasks of a dataset, unless
    `own_questions` says that the sender may publish them; or one of its cards holds what looks like a key."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    stage = read_stage(folder)
    kind = _kind_of(folder, stage)
    if stage is not None and stage.status != "finished":
        raise UsageError(f"{folder} is not finished: run the command that writes it again, which goes on")
    cards = [name for name in (CARD, DATA_CARD) if (folder / name).is_file()]
    places = [run.dataset for name in cards for run in read_card(folder, name).runs]
    origins = [*places, *filter(None, Run(folder, stage).datasets if stage is not None else ())]
    _refuse_secret(folder, origins)
    if kind is RUN and not own_questions:
        _refuse_asked(folder, origins)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = tuple(name for name in names if _is_sent(folder, name, kind))
    for name in set(files) & set(CARDS):
        text = (folder / name).read_text(errors="replace")
        if without_secrets(text) != text:
            raise UsageError(f"{folder / name} holds what looks like a key: take it out first")
    return Parcel(folder, kind, files, tuple(name for name in names if name not in files))


def send(parcel: Parcel, to: str, *, public: bool = False, endpoint: str | None = None) -> Sent:
    """Make the repository OWNER/NAME if there is none, and upload the files as one change; unless `public`, one that is
    public is refused. `endpoint` is the hub's address, None that of its client, as is the token. Raises MissingExtra:
    huggingface_hub is not installed; UsageError: the hub refuses, the repository is public, or a file holds the token;
    InfrastructureFault: the hub cannot be reached."""
    with optional("hub", "huggingface-hub"):
        from huggingface_hub import HfApi, get_token
    api, kind, token = HfApi(endpoint=endpoint), parcel.kind.repository, get_token() or ""
    for name in parcel.files:
        if token and _holds(parcel.folder / name, token.encode()):
            raise UsageError(f"{parcel.folder / name} holds the hub's token: take it out first")
    with _explain_refusals(to, token):
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
        return Sent(url, str(done.oid))


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


def _is_sent(folder: Path, name: str, kind: Kind) -> bool:
    hidden = any(part.startswith(".") for part in Path(name).parts)
    inside = (folder / name).resolve().is_relative_to(folder.resolve())
    # `*` of a pattern stays within its folder.
    matches = (fnmatchcase(name, each) and name.count("/") == each.count("/") for each in kind.patterns)
    return not hidden and inside and any(matches)


def _holds(path: Path, word: bytes) -> bool:
    before = b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            if word in before + block:
                return True
            before = block[-len(word) :]
    return False


@contextmanager
def _explain_refusals(to: str, token: str) -> Iterator[None]:
    """Say in one line what the hub's client raises."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    def line(error: Exception) -> str:
        text = " ".join(str(error).split())
        return without_secrets(text.replace(token, HIDDEN) if token else text)

    try:
        yield
    except HfHubHTTPError as error:
        kind: Any = InfrastructureFault if error.response.status_code >= 500 else UsageError
        raise kind(f"the hub does not take {to}: {line(error)}") from error
    except (httpx.HTTPError, ConnectionError) as error:
        raise InfrastructureFault(f"the hub cannot be reached: {line(error)}") from error
    except ValueError as error:  # the name of the repository, or the front matter of README.md
        raise UsageError(f"the hub's client does not take {to}: {line(error)}") from error


SECRET = frozenset(name for name, each in BENCHMARKS.items() if each.secret_answers)
GENERATED = ("world:", "stdlib")


def _refuse_secret(folder: Path, origins: Sequence[str]) -> None:
    for place in (str(folder), *origins):
        before, colon, rest = place.partition(":")
        path = Path(rest if colon and before in BENCHMARKS else place)
        stage = read_stage(path) if path.is_dir() else None
        inputs = stage.inputs if stage is not None else {}
        # A dataset may say that it is a benchmark by the name of its folder, or in its card.
        for name in (before, path.name, *(inputs.get(key) for key in ("benchmark", "dataset", "source"))):
            if isinstance(name, str) and name in SECRET:
                raise UsageError(f"{folder} comes from {name}, whose questions and answers must not be published")
        if not place.startswith(GENERATED) and not path.exists():
            raise UsageError(
                f"{folder} was made from {place}, which is gone: whether that may be published cannot be checked"
            )


def _refuse_asked(folder: Path, origins: Sequence[str]) -> None:
    """Refuse a run whose questions are not all tasks of a dataset: whoever asked them knows where they come from."""
    if not origins:
        raise UsageError(
            f"the card of {folder} names no dataset: whether its questions may be published cannot be checked; give"
            " --own-questions if they are yours to publish"
        )
    for number, line in read_lines(folder / EPISODES) if (folder / EPISODES).is_file() else ():
        try:
            task = msgspec.json.decode(line, type=_Line).task
        except MALFORMED as error:
            raise SchemaError(f"{folder / EPISODES}:{number}: {error}") from error
        if task.split == ASKED:
            raise UsageError(
                f"{folder} holds a question that is no task of its dataset ({task.task_id}): whether it may be"
                " published cannot be checked; give --own-questions if it is yours to publish"
            )


class _Line(msgspec.Struct):
    task: Task
