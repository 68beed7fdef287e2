"""Downloads files of datasets from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from harness1.data.benchmarks.registry import Benchmark, Hub
from harness1.data.benchmarks.tables import find_files
from harness1.errors import InfrastructureFault, MissingExtra, UsageError
from harness1.runs.stage import Stage, read_stage, refuse_foreign, under_way

VERB = "data get"
LAYOUT = ("corpus.jsonl*", "queries.jsonl*", "qrels/*.tsv*")
"""The files of a dataset in BEIR layout."""
Revisions = Mapping[str, str]
"""The revision of each repository."""
_ANY: Revisions = MappingProxyType({})


def get_benchmark(benchmark: Benchmark, out: Path, *, force: bool = False) -> None:
    """Download the files of the hub, unchanged, into a folder that `NAME:FOLDER` opens, if that is not done yet.

    An interrupted download is resumed.

    Raises:
        MissingExtra: the hub's client, which comes with `datasets`, is not installed.
        InfrastructureFault: the hub cannot be reached.
        UsageError: the hub does not hand the files out, or the folder holds something else.
    """
    get_from_hub(benchmark.name, benchmark.hub, out, by_hand(benchmark), force=force)


def by_hand(benchmark: Benchmark) -> str:
    """Say how the files of a benchmark are placed without the hub."""
    return f"Fetch them by other means ({benchmark.origin}), then: harness1 data import {benchmark.name} PATH"


def get_from_hub(
    name: str, hubs: Sequence[Hub], out: Path, otherwise: str, *, revisions: Revisions = _ANY, force: bool = False
) -> Revisions:
    """Download files of the hub into a folder, if that is not done yet; return the revisions that they are of.

    Args:
        hubs: the files; each repository is downloaded as it is now, unless `revisions` names it.
        otherwise: what to do where they cannot be downloaded, for the message.

    Raises:
        The same as `get_benchmark`.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise MissingExtra("datasets", "data") from error
    stage = Stage(VERB, {"benchmark": name, "hub": [[hub.repository, *hub.patterns] for hub in hubs]})
    if stage.is_done(out) and not force:
        done = read_stage(out)
        return done.hashes if done else {}
    refuse_foreign(out, VERB)
    taken: dict[str, str] = {}
    for hub in hubs:
        with _told(name, hub, otherwise):
            # Offline, a download into an existing folder does nothing, so the hub is asked before the folder exists.
            found = str(HfApi().dataset_info(hub.repository).sha)
        revision = taken[hub.repository] = revisions.get(hub.repository, found)
        patterns, folder = list(hub.patterns), out / hub.folder
        with under_way(stage, out), _told(name, hub, otherwise):
            snapshot_download(
                hub.repository, repo_type="dataset", revision=revision, allow_patterns=patterns, local_dir=folder
            )
        if not find_files(folder, *patterns):
            raise UsageError(_unavailable(name, hub, "does not have them any more", otherwise))
    stage.write(out, status="finished", hashes=taken)
    return taken


@contextmanager
def _told(name: str, hub: Hub, otherwise: str) -> Iterator[None]:
    """Tell the user what to do if the hub fails within this context."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError) as error:
        raise UsageError(_unavailable(name, hub, "refuses them", otherwise)) from error
    except (LocalEntryNotFoundError, httpx.HTTPError, ConnectionError) as error:
        raise InfrastructureFault(_unavailable(name, hub, "cannot be reached", otherwise)) from error


def _unavailable(name: str, hub: Hub, why: str, otherwise: str) -> str:
    return f"the files of {name} ({hub.repository}) cannot be downloaded: the hub {why}. {otherwise}"
