"""Every file of an index may be damaged: what was read comes back as before, or an error of ours names the damage."""

from __future__ import annotations

import os
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness1.config import Config, load_config
from harness1.data.open import open_source
from harness1.errors import CorpusError, HarnessError
from harness1.records import ChunkId, DocId
from harness1.retrieval.build import add_documents, build_index, delete_documents
from harness1.retrieval.files import CURRENT, check_index, current_generation
from harness1.retrieval.protocol import RetrievalFault, SearchRequest
from harness1.retrieval.retriever import open_embedded
from tests.attack.attack import Attack
from tests.support import run

FLIPS = 900
"""Damaged indexes in all, of the three kinds together."""
KINDS = {
    "terms": [],
    "exact": ["index.dense.model=hash:64"],
    "hnsw": ["index.dense.model=hash:64", "index.dense.search=hnsw"],
}
QUERIES = ("river bridge castle", "who founded the company", "born in the city", "treaty of", "harbour", "museum 19")
PATTERNS = (r"\bfounded\b", "(?i)City", "[a-m]ur[a-z]+ of", "19[0-9][0-9]")
NAMES = re.compile("DamagedFile|No such file")
PATIENCE = 600.0
"""Seconds that an answer may take: a busy machine is no damage."""

Answers = list[Any]


class Place(NamedTuple):
    """An index, the files that its readers use, what is asked of it, and what it answers whole."""

    index: Path
    files: list[Path]
    config: Config
    doc_ids: list[DocId]
    answers: Answers


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """An index of two segments, one of them with deleted chunks."""
    config, index = load_config(None, KINDS[request.param]), tmp_path_factory.mktemp("flips") / request.param
    documents = list(open_source("world:600").documents())
    build_index(documents[:-100], index, config.index)
    add_documents(documents[-100:], index)
    delete_documents([each.doc_id for each in documents[5:25]], index)
    read = [current_generation(index), index / "vectors"]
    files = [index / CURRENT, *(path for folder in read for path in sorted(folder.rglob("*")) if path.is_file())]
    made = Place(index, files, config, [documents[at].doc_id for at in (0, 10, 333, -1)], [])
    kind, answers = in_child(lambda: answers_of(made))
    assert kind == "answers"
    return made._replace(answers=answers)


def answers_of(place: Place) -> Answers:
    retriever = open_embedded(place.index, place.config)
    named = [ChunkId(doc_id) for doc_id in place.doc_ids]
    asked = [SearchRequest(query, 10, frozenset(named), PATIENCE) for query in QUERIES]
    answers: Answers = [retriever.info]
    for found in run(retriever.search([*asked, *(SearchRequest(query, 30, deadline=PATIENCE) for query in QUERIES)])):
        answers.append(found if isinstance(found, RetrievalFault) else found.hits)
    answers += [run(retriever.grep(pattern, 20, PATIENCE)) for pattern in PATTERNS]
    answers += [run(retriever.read(doc_id)) for doc_id in place.doc_ids]
    return [*answers, run(retriever.get(named))]


def checked(place: Place) -> bool:
    try:
        return not check_index(place.index).damaged
    except CorpusError:
        return False


def in_child(work: Callable[[], Any]) -> tuple[str, Any]:
    """Do work in another process; what it returned, which error of ours or another's ended it, or how it died."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            outcome: tuple[str, Any] = ("answers", work())
        except HarnessError as error:
            outcome = ("error", str(error))
        except Exception as error:  # noqa: BLE001
            outcome = ("foreign", repr(error))
        with suppress(OSError), os.fdopen(writing, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitpid(child, 0)[1]
    return pickle.loads(data) if data else ("died", status)


HARM = ("flip", "flip", "flip", "flip some", "cut", "lengthen", "blank", "swap")


def harm(kind: str, data: bytearray, rng: random.Random) -> None:
    place, size = rng.randrange(len(data)), rng.choice((1, 8, 16, 512, 4096, 1 << 16))
    match kind:
        case "flip" | "flip some":
            for _ in range(1 if kind == "flip" else rng.randint(2, 20)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "cut":
            del data[rng.choice((0, len(data) - 1, place)) :]
        case "lengthen":
            data += rng.randbytes(size)
        case "blank":
            data[place : place + size] = rng.choice((b"\0", b"\xff")) * min(size, len(data) - place)
        case _:  # exchange two stretches, or overwrite one with another
            one, other = (rng.randrange(max(1, len(data) - size)) for _ in range(2))
            taken = data[one : one + size], data[other : other + size]
            data[other : other + len(taken[0])] = taken[0]
            if rng.random() < 0.5:
                data[one : one + len(taken[1])] = taken[1]


@contextmanager
def damaged(path: Path, files: list[Path], rng: random.Random) -> Iterator[str]:
    before = path.read_bytes()
    try:
        choice = rng.randrange(len(HARM) + 2)
        if choice == len(HARM):
            path.unlink()
            yield "removed"
        elif choice > len(HARM):
            other = rng.choice(files)
            path.write_bytes(other.read_bytes())
            yield f"replaced by {other.name}"
        else:
            data = bytearray(before)
            harm(HARM[choice], data, rng)
            path.write_bytes(data)
            yield HARM[choice]
    finally:
        path.write_bytes(before)


def verdict(place: Place) -> str:
    kind, outcome = in_child(lambda: (answers_of(place), checked(place)))
    if kind != "answers":
        return "refused" if kind == "error" else f"{kind}: {outcome}"
    answers, whole = outcome
    worst = "unseen" if whole else "harmless"
    for answer, expected in zip(answers, place.answers, strict=True):
        if isinstance(answer, RetrievalFault) and NAMES.search(answer.message):
            worst = "faulted"
        elif answer != expected:
            return f"wrong: {answer} instead of {expected}"
    return worst


def test_a_damaged_file_is_noticed_or_changes_nothing(place: Place, attack: Attack) -> None:
    rng = attack.random(f"flips {place.index.name}")
    outcomes: Counter[str] = Counter()
    shuffled, sizes = rng.sample(place.files, len(place.files)), [path.stat().st_size for path in place.files]
    for number in range(attack.times(FLIPS // len(KINDS))):
        # Every file has its turn, and large ones, of which a search reads a part, come as often again.
        path = shuffled[number // 2 % len(shuffled)] if number % 2 else rng.choices(place.files, sizes)[0]
        before = path.read_bytes()
        with damaged(path, place.files, rng) as how:
            said = verdict(place)
            changed = not path.exists() or path.read_bytes() != before
        outcomes[said] += 1
        shown = f"{path.relative_to(place.index)} {how}: {said}"
        assert said in ("refused", "faulted", "harmless", "unseen"), shown
        # What grows behind the embeddings in use is no damage, and an index without checksums says so.
        assert said != "unseen" or not changed or "vectors" in path.parts or path.name == CURRENT, shown
    assert verdict(place) == "unseen"
    attack.report(f"flips, {place.index.name}", damaged=outcomes.total(), **outcomes)
