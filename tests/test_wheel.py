"""What is released: the wheel and the source distribution are whole, and the wheel works away from the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import harness1

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parent.parent
MADE = re.compile(r"PKG-INFO|setup\.cfg|harness1\.egg-info/.*")
"""Files that the build adds to the source distribution."""
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The environment of this process, without a way to the checkout."""
LISTENER = """
import os, sys

LOG = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
PLACES = {{"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}}

def listen(event, details):
    writes = event == "open" and (details[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    place = details[0] if writes else details[PLACES[event]] if event in PLACES else 0
    if not isinstance(place, int):
        os.write(LOG, os.fsencode(os.path.abspath(place)) + b"\\n")

sys.addaudithook(listen)
"""
"""Runs in every process of an installed program: lists the files and folders that it writes."""


def called(*command: object, **more: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def files() -> list[str]:
    """The files of the checkout that are not ignored."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("a release is built from a checkout")
    listed = called("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def dist(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built once from a copy of the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    called(sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "dist", copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A function that runs a program of somebody who has the wheel, the dependencies of this interpreter, and no
    checkout: it may write to folders of its own and to nowhere else."""
    root = tmp_path_factory.mktemp("newcomer")
    for name in ("home", "work"):
        (root / name).mkdir()
    called(sys.executable, "-m", "venv", "--without-pip", root / "venv")
    pip = (sys.executable, "-m", "pip", "--python", root / "venv" / "bin" / "python", "install", "--quiet")
    called(*pip, "--no-compile", "--no-deps", "--no-index", next(dist.glob("*.whl")), env=CLEAN)
    packages = next((root / "venv" / "lib").glob("python*")) / "site-packages"
    (packages / "listener.py").write_text(LISTENER.format(log=str(root / "log")))
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "shared.pth").write_text("\n".join(["import listener", *sorted(shared)]))
    env = {
        "HOME": str(root / "home"),
        "LANG": "C.UTF-8",
        "PATH": f"{root / 'venv' / 'bin'}:/usr/bin:/bin",
        "PYTHONPYCACHEPREFIX": str(root / "home" / "pyc"),
        "TMPDIR": str(root / "home"),
    }

    def run(program: str, *arguments: str) -> str:
        out = called(root / "venv" / "bin" / program, *arguments, cwd=root / "work", env=env)
        written = (root / "log").read_text().splitlines() if (root / "log").exists() else []
        assert {place for place in written if not place.startswith((str(root), "/dev/"))} == set()
        return out

    return run


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(files: list[str], dist: Path) -> None:
    names = zipfile.ZipFile(next(dist.glob("*.whl"))).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    assert held == {name for name in files if name.startswith(("harness1/", "harness1_verifiers/"))}
    assert {"harness1/py.typed", "harness1/config/shipped/sft/small.toml", "harness1/viewer/page/style.css"} <= held


def test_the_source_distribution_holds_every_file_of_the_checkout(files: list[str], dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        held = {each.name.partition("/")[2] for each in archive if each.isfile()}
    assert {name for name in held if not MADE.fullmatch(name)} == set(files)


def test_the_package_works_from_where_it_was_installed(installed: Callable[..., str]) -> None:
    assert installed("harness1", "--version") == f"harness1 {harness1.__version__}\n"
    place = Path(installed("python", "-c", "import harness1; print(harness1.__file__)").strip())
    assert (place.is_relative_to(ROOT), place.parts[-3:]) == (False, ("site-packages", "harness1", "__init__.py"))


def test_own_files_are_searched_and_shown_without_a_checkout(installed: Callable[..., str]) -> None:
    write = "import pathlib as p; p.Path('notes').mkdir(); p.Path('notes', {!r}).write_text({!r})"
    installed("python", "-c", write.format("france.md", "The capital of France is Paris."))
    assert "1 document" in installed("harness1", "index", "notes", "--out", "notes.index")
    asked = ("search", "capital of France", "--index", "notes.index", "--out", "run")
    assert json.loads(installed("harness1", *asked, "--json"))["curated"][0]["id"] == "france.md"
    installed("harness1", "view", "run", "--out", "page.html")
    assert "<html" in installed("python", "-c", "print(open('page.html').read())")
