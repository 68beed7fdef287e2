"""Downloads the official files of a benchmark from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness1.data.benchmarks.registry import Benchmark, Hub
from harness1.data.benchmarks.tables import find_files
from harness1.errors import MissingExtra, UsageError
from harness1.runs.stage import Stage, refuse_foreign, under_way

VERB = "data get"


def get_benchmark(benchmark: Benchmark, out: Path, *, force: bool = False) -> None:
    """Download the files of the hub, unchanged, into a folder that `NAME:FOLDER` opens, if that is not done yet.

    An interrupted download is resumed.

    Raises:
        MissingExtra: the hub's client, which comes with `datasets`, is not installed.
        UsageError: the hub cannot be reached or does not hand the files out, or the folder holds something else.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise MissingExtra("datasets", "data") from error
    files = [[hub.repository, *hub.patterns] for hub in benchmark.hub]
    stage = Stage(VERB, {"benchmark": benchmark.name, "hub": files})
    if stage.is_done(out) and not force:
        return
    refuse_foreign(out, VERB)
    revisions: dict[str, str] = {}
    for hub in benchmark.hub:
        with _told(benchmark, hub):
            # Offline, a download into an existing folder does nothing, so the hub is asked before the folder exists.
            revision = revisions[hub.repository] = str(HfApi().dataset_info(hub.repository).sha)
        patterns, folder = list(hub.patterns), out / hub.folder
        with under_way(stage, out), _told(benchmark, hub):
            snapshot_download(
                hub.repository, repo_type="dataset", revision=revision, allow_patterns=patterns, local_dir=folder
            )
        if not find_files(folder, *patterns):
            raise _unavailable(benchmark, hub, "does not have them any more")
    stage.write(out, status="finished", hashes=revisions)


@contextmanager
def _told(benchmark: Benchmark, hub: Hub) -> Iterator[None]:
    """Tell the user what to do if the hub fails within this context."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except HfHubHTTPError as error:
        raise _unavailable(benchmark, hub, "refuses them") from error
    except (LocalEntryNotFoundError, httpx.HTTPError, ConnectionError) as error:
        raise _unavailable(benchmark, hub, "cannot be reached") from error


def _unavailable(benchmark: Benchmark, hub: Hub, why: str) -> UsageError:
    return UsageError(
        f"the files of {benchmark.name} ({hub.repository}) cannot be downloaded: the hub {why}. Fetch them by other"
        f" means ({benchmark.origin}), then: harness1 data import {benchmark.name} PATH --out FOLDER"
    )
