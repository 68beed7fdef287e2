"""The files around the package, as hosts and tools read them, say what is so."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from readme_renderer import markdown
from selectolax.lexbor import LexborHTMLParser as HTMLParser

import harness1
from docs.site.index_readme import with_addresses

ROOT = Path(__file__).parent.parent


CONTAINERS = sorted((ROOT / "containers").iterdir())


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_checks_of_a_change_are_those_of_the_repository() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    run = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert run == {"test": ["make test"], "all": [".ci/run"], "docs": ["make docs"]}
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert all(job["timeout-minutes"] <= 60 for job in jobs.values())
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_the_citation_and_the_changelog_have_the_version() -> None:
    cited = read(ROOT / "CITATION.cff")
    assert (cited["version"], cited["license"]) == (harness1.__version__, "Apache-2.0")
    assert f"\n## {harness1.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_of_an_index_shows_the_readme_with_links_that_lead_somewhere() -> None:
    at = "https://example.org/owner/name"
    page = markdown.render(with_addresses((ROOT / "README.md").read_text(), at, "v1"))
    assert page is not None
    nodes = HTMLParser(page).css("a[href], img[src]")
    links = [node.attributes.get("href") or node.attributes.get("src") or "" for node in nodes]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    own = [re.fullmatch(rf"{at}/(blob|raw)/v1/([^#]+)(#.*)?", link) for link in links if link.startswith(at)]
    assert len(own) > 5
    assert [link[0] for link in own if link is None or not (ROOT / link[2]).is_file()] == []
    assert {link[1] for link in own if link and link[2].endswith(".png")} == {"raw"}


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_a_container_is_described_as_it_should_be(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_a_container_copies_all_that_its_build_is_given(path: Path) -> None:
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", path.read_text(), re.MULTILINE)
    given = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(" ".join(copied).split()) == sorted(given)
    assert "\nUSER 1000\n" in path.read_text()


def test_every_package_that_the_tests_import_is_declared() -> None:
    declared = set(required(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], "test"))
    owners = packages_distributions()
    ours = {"harness1", "tests", "benchmarks", "docs"}
    missing = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / "tests").rglob("*.py")
        for module in imported(path) - sys.stdlib_module_names - ours
        if not declared & {canonicalize_name(name) for name in owners.get(module, [module])}
    }
    assert missing == set()


def required(project: dict[str, Any], extra: str) -> Iterator[str]:
    """Yield the names of what an extra installs at the project's own word, with the core and the extras it includes."""
    for line in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        wanted = Requirement(line)
        if wanted.name == project["name"]:
            for included in wanted.extras:
                yield from required(project, included)
        else:
            yield canonicalize_name(wanted.name)


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found
