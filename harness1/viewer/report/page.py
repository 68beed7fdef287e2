"""`report.html`: one page about a run, for people; made of the other files of its folder and nothing else.

The page has no script and loads nothing. What depends on the clock and the machine stands in its section `machine`; the
rest is the same for every run of the same episodes.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from harness1.runs.files import write_atomically
from harness1.runs.folder import REPORT
from harness1.viewer.report.files import RunFiles, read_run_files
from harness1.viewer.report.markup import Markup, element, joined
from harness1.viewer.report.origin import ablations, hashes, machine, settings
from harness1.viewer.report.results import distributions, failures, headline, metrics_in_full, spread, tasks, tool_mix

CSP = "default-src 'none'; style-src 'unsafe-inline'"
SECTIONS = (
    headline,
    distributions,
    tool_mix,
    failures,
    spread,
    tasks,
    ablations,
    metrics_in_full,
    settings,
    hashes,
    machine,
)
"""In their order; one that has nothing to say is empty."""


def write_report(folder: Path) -> None:
    """Write the report of a run folder into it.

    Raises:
        UsageError: it is no run folder, or has no metrics yet.
        SchemaError: one of its files is not what it should be.
    """
    write_atomically(folder / REPORT, report(read_run_files(folder)).encode())


def ensure_report(folder: Path) -> None:
    """As `write_report`, unless it is there: who makes anew what it is made of takes it away."""
    if not (folder / REPORT).is_file():
        write_report(folder)


def report(files: RunFiles) -> str:
    """The whole page."""
    name = title(files)
    style = Markup(resources.files("harness1.viewer.report").joinpath("page", "report.css").read_text(encoding="utf-8"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=CSP),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", name),
        element("style", style),
    )
    body = element("main", _header(files, name), *(section(files) for section in SECTIONS))
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def title(files: RunFiles) -> str:
    """What was run on what."""
    inputs, policy = files.stage.inputs, files.stage.outputs.get("policy", "run")
    return f"{policy} on {Path(str(inputs.get('dataset', '?'))).name}/{inputs.get('split', '?')}"


def _header(files: RunFiles, name: str) -> Markup:
    metrics, inputs = files.metrics, files.stage.inputs
    counted = [
        f"{metrics.get('tasks', 0):,} tasks",
        f"{metrics.get('episodes', 0):,} episodes, {inputs.get('samples', 1)} for each",
        f"seed {inputs.get('seed', 0)}",
    ]
    lines = [element("h1", name), element("p", " · ".join(counted), class_="facts")]
    if files.stage.status != "finished":
        said = f"This run is {files.stage.status}: what follows is not all of it."
        lines.append(element("p", said, class_="warning"))
    if sources := inputs.get("fused"):
        rollouts = sum(source.get("samples", 1) for source in sources)
        said = f"Each episode is fused from {rollouts} rollouts: not to be compared with a single one."
        lines.append(element("p", said, class_="warning"))
    return element("header", joined(lines))
