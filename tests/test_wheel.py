"""What is released: the wheel and the source distribution are whole, and both work away from the checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import harness1

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parent.parent
FAST = ("tests/test_words.py", "tests/test_config.py", "tests/memory/test_sentences.py", "tests/viewer/test_page.py")
"""Tests that run from the source distribution."""
MADE = re.compile(r"PKG-INFO|setup\.cfg|harness1\.egg-info/.*")
"""Files that the build adds to the source distribution."""
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
RUNNING = f"3.{sys.version_info.minor}"
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


def build(source: Path, out: Path, *more: str) -> None:
    called(sys.executable, "-m", "build", "--no-isolation", *more, "--outdir", out, source)


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
    build(copy, copy / "dist")
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("source")
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(place, filter="data")
    return next(place.iterdir())


@dataclass(frozen=True)
class Newcomer:
    """The folders of somebody who has the wheel and no checkout: `venv`, `home`, and `work`, where commands run."""

    root: Path

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of the environment; it may write to these folders and to nowhere else."""
        env = {
            "HOME": str(self.root / "home"),
            "LANG": "C.UTF-8",
            "PATH": f"{self.root / 'venv' / 'bin'}:/usr/bin:/bin",
            "PYTHONPYCACHEPREFIX": str(self.root / "home" / "pyc"),
            "TMPDIR": str(self.root / "home"),
        }
        out = called(self.root / "venv" / "bin" / program, *arguments, cwd=self.root / "work", env=env)
        written = (self.root / "log").read_text().splitlines() if (self.root / "log").exists() else []
        assert {place for place in written if not place.startswith((str(self.root), "/dev/"))} == set()
        return out


def newcomer(root: Path, python: str) -> Newcomer:
    for name in ("home", "work"):
        (root / name).mkdir()
    called(python, "-m", "venv", "--without-pip", root / "venv")
    return Newcomer(root)


def pip(who: Newcomer, *arguments: object) -> subprocess.CompletedProcess[str]:
    python = str(who.root / "venv" / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False, env=CLEAN)


def search_two_notes(who: Newcomer) -> None:
    (who.root / "work" / "notes").mkdir()
    (who.root / "work" / "notes" / "france.md").write_text("The capital of France is Paris.")
    (who.root / "work" / "notes" / "bees.md").write_text("Bees make honey.")
    assert "2 documents" in who.run("harness1", "index", "notes", "--out", "notes.index")
    found = json.loads(who.run("harness1", "search", "capital of France", "--index", "notes.index", "--json"))
    assert found["curated"][0]["id"] == "france.md"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    """An environment with the wheel that sees the dependencies of this interpreter, but not the checkout."""
    who = newcomer(tmp_path_factory.mktemp("newcomer"), sys.executable)
    done = pip(who, "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stderr
    packages = who.root / "venv" / "lib" / f"python{RUNNING}" / "site-packages"
    (packages / "listener.py").write_text(LISTENER.format(log=str(who.root / "log")))
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "shared.pth").write_text("\n".join(["import listener", *sorted(shared)]))
    return who


def test_the_wheel_holds_the_package_with_its_data_and_nothing_else(files: list[str], wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {name for name in files if name.startswith(("harness1/", "harness1_verifiers/"))}
    assert {"harness1/py.typed", "harness1/config/shipped/sft/small.toml", "harness1/viewer/page/style.css"} <= held


def test_the_source_distribution_holds_every_file_of_the_checkout(files: list[str], unpacked: Path) -> None:
    held = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert {name for name in held if not MADE.fullmatch(name)} == set(files)


def test_tests_run_from_the_source_distribution(unpacked: Path) -> None:
    command = (sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *FAST)
    assert " passed" in called(*command, cwd=unpacked, env=CLEAN | {"NUMBA_DISABLE_JIT": "1"})


def test_the_package_is_imported_from_where_it_was_installed(installed: Newcomer) -> None:
    assert installed.run("harness1", "--version") == f"harness1 {harness1.__version__}\n"
    place = installed.run("python", "-c", "import harness1; print(harness1.__file__)")
    assert Path(place.strip()).is_relative_to(installed.root / "venv")


def test_the_demo_runs_and_opens_in_the_viewer_without_a_checkout(installed: Newcomer) -> None:
    shown = " ".join(installed.run("harness1", "demo").split())
    assert "were found" in shown
    installed.run("harness1", "view", "runs/demo/run", "--out", "page.html")
    assert "<html" in (installed.root / "work" / "page.html").read_text()


def test_own_files_are_searched_without_a_checkout(installed: Newcomer) -> None:
    search_two_notes(installed)


def interpreter(version: str) -> str | None:
    """Return an interpreter of a version on this machine: on the path, or among those of pyenv."""
    places = [shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        places += map(str, Path(called("pyenv", "root").strip()).glob(f"versions/{version}.*/bin/python"))
    runs = (place for place in filter(None, places) if subprocess.run([place, "-c", ""], check=False).returncode == 0)
    return next(runs, None)


@pytest.mark.parametrize("version", sorted({*re.findall(r"3\.\d+", " ".join(CLASSIFIERS))} - {RUNNING}))
def test_a_version_of_python_that_the_metadata_names_runs_it(version: str, wheel: Path, tmp_path: Path) -> None:
    if (python := interpreter(version)) is None:
        pytest.skip(f"Python {version} is not on this machine")
    who = newcomer(tmp_path, python)
    if (done := pip(who, wheel)).returncode:
        pytest.skip(f"the dependencies cannot be installed for Python {version}: {done.stderr.strip()[-300:]}")
    assert who.run("harness1", "--version") == f"harness1 {harness1.__version__}\n"
    search_two_notes(who)


def test_a_container_has_the_files_that_the_wheel_is_built_from(files: list[str], wheel: Path, tmp_path: Path) -> None:
    let_through = tuple(line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!")
    for name in files:
        if name.startswith(let_through):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    build(tmp_path, tmp_path / "dist", "--wheel")
    built = next((tmp_path / "dist").glob("*.whl"))
    code = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith(".md")}
    assert code <= {*zipfile.ZipFile(built).namelist()}
