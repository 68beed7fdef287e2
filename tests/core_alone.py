"""The core without any extra, in an environment that has them all: imports of other packages fail as if absent."""

import subprocess
import sys
import sysconfig
from importlib.metadata import distribution, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
REFUSING = """
import sys
from importlib.machinery import PathFinder

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if path is None and name not in CORE and PathFinder.find_spec(name, PACKAGES) is not None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
"""


def core_modules() -> list[str]:
    """The top-level modules of the packages that a plain installation brings, itself left out."""
    known, left = set[str](), ["harness1"]
    while left:
        name = canonicalize_name(left.pop())
        if name not in known:
            known.add(name)
            wanted = map(Requirement, requires(name) or ())
            left += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    files = [file for name in known - {"harness1"} for file in distribution(name).files or ()]
    return ["harness1", *sorted({file.parts[0].partition(".")[0] for file in files if file.suffix in (".py", ".so")})]


def run_in_core(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own that can import the core alone."""
    packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    script = f"CORE, PACKAGES = {core_modules()}, {packages}\n{REFUSING}\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
