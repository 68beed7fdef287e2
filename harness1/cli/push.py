"""harness1 push: a run, a dataset or a policy on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from harness1.adapters.hub import pack, send
from harness1.cli.options import Json
from harness1.cli.printing import print_result, put
from harness1.errors import UsageError
from harness1.plain import counted


def push(
    folder: Annotated[
        Path, Argument(help="A run, a dataset (BEIR layout or of `sft build`) or a policy.", metavar="FOLDER")
    ],
    to: Annotated[str, Option(help="The repository on the hub; it is made if there is none.", metavar="OWNER/NAME")],
    public: Annotated[bool, Option("--public", help="Let everybody read a new repository.")] = False,
    own_questions: Annotated[
        bool, Option("--own-questions", help="Questions that are no tasks of a dataset are yours to publish.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    endpoint: Annotated[
        str | None, Option(help="The hub's address, if it is not the one of its client.", metavar="URL")
    ] = None,
    as_json: Json = False,
) -> None:
    """Send a run, a dataset or a policy to the Hugging Face hub, for its owner alone unless --public is given.

    The token is the one of the hub's own client: hf auth login.

    Example: harness1 push runs/scifact --to me/scifact-run --dry-run
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", to):
        raise UsageError(f"--to is OWNER/NAME, not {to!r}")
    parcel = pack(folder, own_questions=own_questions)
    found: dict[str, Any] = {
        "to": to,
        "kind": parcel.kind.repository,
        "public": public,
        "files": {name: (folder / name).stat().st_size for name in parcel.files},
        "left": parcel.left,
    }
    if not dry_run:
        found |= send(parcel, to, public=public, endpoint=endpoint)._asdict()
    print_result(found, as_json, _tell)


def _tell(found: dict[str, Any]) -> None:
    files, sent = found["files"], "url" in found
    for name, size in files.items() if not sent else ():
        put(f"{size:>14,}  {name}")
    for name in found["left"]:
        put(f"{'stays':>14}  {name}")
    what = f"{counted(len(files), 'file')}, {sum(files.values()) / 1e6:,.1f} MB"
    who = "public" if found["public"] else "private"
    put(f"{found['url']}: {what}, change {found['commit']}" if sent else f"{what} for {found['to']}, {who}; not sent")
