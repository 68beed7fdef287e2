"""What two runs of the same episodes must have in common."""

import re
from pathlib import Path

from harness1.runs.folder import CONFIG, METRICS, REPORT, SUBMISSION, TASKS
from harness1.viewer.report import ensure_report

MACHINE = re.compile(rb'<section id="machine".*?</section>', re.DOTALL)


def repeatable(folder: Path) -> dict[str, bytes]:
    """The files of a run folder that depend neither on the clock nor on the machine; of the report, what does not."""
    patterns = (METRICS, TASKS, CONFIG, "*.trec", f"{SUBMISSION}*/*")
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    ensure_report(folder)
    report = (folder / REPORT).read_bytes()
    assert MACHINE.search(report)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths} | {REPORT: MACHINE.sub(b"", report)}
