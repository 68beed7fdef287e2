"""The hash of what a stage made: equal content has an equal hash in every folder, whenever and however it was made."""

from __future__ import annotations

from pathlib import Path

from harness1.errors import UsageError
from harness1.hashing import digest, file_digest
from harness1.runs.stage import STAGE, read_raw_stage

CONTENT = (
    *("corpus.jsonl*", "queries.jsonl*", "qrels/*", "tasks.jsonl"),
    *("tasks.csv", "curated*.trec", "pool*.trec", "*/tasks.csv", "*/curated*.trec"),
    *("policies/*/tasks.csv", "policies/*/curated*.trec"),
    *("train.jsonl", "held_out.jsonl"),
    *("*.safetensors", "*.gguf", "tokenizer.json", "config.json", "adapter_config.json"),
)
"""The files that are content: datasets, results of runs, rows, models. Times, paths and pages are not."""
INDEX = "index"


def artifact(place: Path) -> str:
    """Return the hash of a file, or of the content of a folder; empty if there is none.

    Of a folder that holds none of the files in `CONTENT`, every file counts, but no card.

    Raises:
        UsageError: the place cannot be read.
    """
    try:
        if not place.is_dir():
            return file_digest(place)
        if (card := read_raw_stage(place)) is not None and INDEX in card.hashes and card.verb == INDEX:
            return card.hashes[INDEX]
        files = sorted({file for pattern in CONTENT for file in place.glob(pattern) if file.is_file()})
        files = files or sorted(file for file in place.rglob("*") if file.is_file() and file.name != STAGE)
        return digest({str(file.relative_to(place)): file_digest(file) for file in files}) if files else ""
    except OSError as error:
        raise UsageError(f"{error.filename or place}: {error.strerror}") from error
