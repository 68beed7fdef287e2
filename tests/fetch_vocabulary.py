"""Fetches the vocabulary of gpt-oss for the tests of the Harmony format, which are skipped without it.

The file is made of the npm package js-tiktoken (MIT), which carries the ranks of o200k_base; its checksum is the one
that `tiktoken` demands of the original. Without npm or a network it says so, and ends well.

    python tests/fetch_vocabulary.py
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "js-tiktoken@1.0.21"
MEMBER = "package/dist/ranks/o200k_base.js"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
VOCABULARY = Path(__file__).parent / ".vocab" / "o200k_base.tiktoken"
TIMEOUT_S = 120


def main() -> None:
    if VOCABULARY.is_file() and checksum(VOCABULARY.read_bytes()) == SHA256:
        print(f"{VOCABULARY} is there")
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = ranks_file(packed(Path(folder)))
    except (OSError, subprocess.SubprocessError, tarfile.TarError, KeyError, ValueError) as error:
        print(f"no vocabulary ({error}): the tests that compare with openai-harmony will be skipped")
        return
    if checksum(data) != SHA256:
        print(f"the vocabulary in {PACKAGE} is another one: it is not used")
        return
    VOCABULARY.parent.mkdir(exist_ok=True)
    VOCABULARY.write_bytes(data)
    print(f"wrote {VOCABULARY}")


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def packed(folder: Path) -> str:
    """The source of the ranks out of the package, which npm puts into a folder."""
    command = ["npm", "pack", PACKAGE, "--silent", "--pack-destination", str(folder)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, cwd=folder, capture_output=True)
    with tarfile.open(next(folder.glob("*.tgz"), folder / "no package")) as archive:
        member = archive.extractfile(MEMBER)
        if member is None:
            raise KeyError(MEMBER)
        return member.read().decode()


def ranks_file(source: str) -> bytes:
    """The file of `tiktoken`, a line `TOKEN RANK` for each, out of `export default {...}`, whose ranks are lines of a
    mark, the first rank, and tokens."""
    tree = json.loads(source.strip().removeprefix("export default ").removesuffix(";"))
    lines = []
    for line in tree["bpe_ranks"].splitlines():
        _, first, *tokens = line.split(" ")
        lines += [f"{token} {rank}\n" for rank, token in enumerate(tokens, start=int(first))]
    return "".join(lines).encode()


if __name__ == "__main__":
    main()
