"""Print the hash of everything that an environment installs: what of pyproject.toml decides it, and what the Makefile
adds."""

import hashlib
import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kept = {name: project[name] for name in ("requires-python", "dependencies", "optional-dependencies", "scripts")}
    entries = project.get("entry-points", {})
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    told = json.dumps([kept, entries, installs], sort_keys=True)
    print(hashlib.sha256(told.encode()).hexdigest()[:12])


if __name__ == "__main__":
    main()
