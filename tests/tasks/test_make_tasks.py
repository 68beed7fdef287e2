"""Sets of tasks: their gold, their splits, the folder that holds them, and its check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness1.data import beir
from harness1.errors import InfrastructureFault
from harness1.http.model_endpoint import Completion, Messages
from harness1.records import DocId, Gold, Task
from harness1.retrieval.corpus import Document
from harness1.tasks.drafts import SINGLE, Draft, Need
from harness1.tasks.graph import CorpusGraph
from harness1.tasks.make import GoldReader, Splitter, make_tasks
from harness1.tasks.questions import REPLIES, SYSTEM, QuestionWriter, fault_of, question_findings
from tests.cli.commands import Command, command_in_process
from tests.serving import imitating
from tests.support import WordRetriever, chunk, run

BORN = "Ada Fenwick was born in Grimsby, a harbour town."
CLOSED = "The harbour of Grimsby was closed for 45 days."


def documents(*texts: tuple[str, str]) -> list[Document]:
    return [Document(DocId(f"d{place}"), title, text) for place, (title, text) in enumerate(texts)]


def searcher(corpus: list[Document]) -> WordRetriever:
    return WordRetriever([chunk(each.doc_id, each.text, each.title) for each in corpus])


def gold_beside(text: str, quoted: str = "") -> tuple[str, ...] | None:
    """The gold of a task on the first document, where a second one has a text; None if it is not clear."""
    corpus = documents(("Ada Fenwick", BORN), ("", text))
    return gold_of(GoldReader(CorpusGraph(corpus), searcher(corpus)), quoted)


def gold_of(reader: GoldReader, quoted: str = "") -> tuple[str, ...] | None:
    need = Need(0, quoted=quoted) if quoted else Need(0, names=("Ada Fenwick", "Grimsby"))
    draft = Draft(SINGLE, "x", "Where was Ada Fenwick born?", "Grimsby", (need,))

    async def read() -> list[tuple[str, ...]]:
        return [made.gold async for made in reader.with_gold(iter([draft]))]

    return next(iter(run(read())), None)


@pytest.mark.parametrize(
    ("text", "quoted", "gold"),
    [
        ("They say that Ada Fenwick came to the world in Grimsby.", "", ("d0", "d1")),
        ("They say that Ada Fenwick never came to a harbour.", "", ("d0",)),
        ("Ada Fenwick was a director. Grimsby was her favourite town.", "", None),
        ("Ada Fenwick was born in Grimsby, a town with a harbour.", BORN, ("d0", "d1")),
        ("Ada Fenwick was seen in a harbour town of the north coast.", BORN, ("d0",)),
        ("The harbour of Grimsby was closed for 45 days.", CLOSED, ("d0", "d1")),
        ("The harbour of Grimsby was closed for 61 days.", CLOSED, None),
    ],
)
def test_a_document_that_says_the_same_joins_the_gold_and_where_it_is_open_the_task_is_dropped(
    text: str, quoted: str, gold: tuple[str, ...] | None
) -> None:
    assert gold_beside(text, quoted) == gold


def test_an_index_that_fails_is_a_fault_of_the_infrastructure() -> None:
    graph = CorpusGraph(documents(("Ada Fenwick", BORN)))
    with pytest.raises(InfrastructureFault, match="does not answer"):
        gold_of(GoldReader(graph, WordRetriever([], faults=1)))


@given(
    st.lists(st.lists(st.integers(0, 12).map(lambda number: DocId(str(number))), min_size=1, max_size=3), max_size=40)
)
def test_no_document_is_gold_in_two_splits(golds: list[list[DocId]]) -> None:
    splitter, owner = Splitter({"train": 0.5, "test": 0.5}), dict[DocId, str]()
    for gold in golds:
        before = {owner[doc_id] for doc_id in gold if doc_id in owner}
        split = splitter.place(gold)
        assert (split is None) == (len(before) > 1)
        for doc_id in gold if split else ():
            assert owner.setdefault(doc_id, split or "") == split


def test_splits_have_their_shares_where_no_gold_is_shared() -> None:
    splitter = Splitter({"train": 0.8, "dev": 0.1, "test": 0.1})
    splits = [splitter.place([DocId(str(number))]) for number in range(100)]
    assert [splits.count(name) for name in ("train", "dev", "test")] == [80, 10, 10]


def corpus_of_films(count: int) -> list[Document]:
    """Films with directors, each of whom has a document, and prose that names them."""
    firsts = "Ada Bea Cora Dora Edna Faye Gail Hope Ines Jane Kate Lena Mona Nora Olga Rosa".split()  # noqa: SIM905
    lasts = "Fenwick Arkwright Bolton Carver Dunmore Eastby Falkirk Garstang Hexham Ilkley".split()  # noqa: SIM905
    found = []
    for number in range(count):
        name = f"{firsts[number % 16]} {lasts[number % 10]}{'' if number < 80 else number}"
        film = f"{lasts[(number * 7 + 3) % 10]} at {('Dawn', 'Noon', 'Dusk', 'Night')[number % 4]} {number + 10}"
        found += [
            (film, f"{film} is a {1930 + number % 60} drama film directed by {name}."),
            (name, f"{name} (born {1880 + number % 50}) is a director. The prize was {number + 100} coins."),
        ]
    return documents(*found)


def test_tasks_are_of_several_kinds_with_gold_in_one_split_and_the_same_every_time() -> None:
    corpus = corpus_of_films(60)
    tasks = make_tasks(corpus, searcher(corpus), 40, seed=3)
    assert tasks == make_tasks(corpus, searcher(corpus), 40, seed=3)
    assert tasks != make_tasks(corpus, searcher(corpus), 40, seed=4)
    assert {task.split for task in tasks} == {"train", "dev", "test"}
    assert {task.metadata["kind"] for task in tasks} >= {"single", "bridge", "comparison", "claim"}
    ids = {document.doc_id for document in corpus}
    assert all(task.gold and task.gold.relevant.keys() <= ids and task.gold.answers for task in tasks)
    assert {finding.name for finding in question_findings(tasks, {}) if finding.count} == set()
    assert all(task.metadata["reach"] < 1 for task in tasks if task.metadata["kind"] == "bridge")


def test_neither_verdict_of_claims_is_the_usual_one() -> None:
    names = [f"{first}{last} Ek" for first in ("An", "Bo", "Cy", "Di") for last in ("ba", "ko")]
    said = "{} is a singer of old songs, born in {}."
    corpus = documents(*((name, said.format(name, name[::-1].title())) for name in names))
    tasks = make_tasks(corpus, searcher(corpus), 40, seed=0)
    claims = [task for task in tasks if task.metadata["kind"] == "claim"]
    assert 0 < len(claims) <= 4  # places are never refuted


def task(name: str, query: str, split: str = "train", gold: str = "d0", **metadata: object) -> Task:
    return Task(name, query, split, Gold({DocId(gold): 1}, answers=("Grimsby",)), {"kind": "single", **metadata})


@pytest.mark.parametrize(
    ("tasks", "finding"),
    [
        ([task("a", "Where was Ada born?"), task("b", "What did Bo ever see?", "test")], "gold_in_two_splits"),
        ([task("a", "Where was Ada born?"), task("b", "where was ada born")], "near_duplicate"),
        ([task("a", "Where?")], "length"),
        ([task("a", "Was Ada born in Grimsby?")], "answer_in_question"),
        ([task("a", "Where does Bo Ek live?", kind="bridge", chain=["d0", "d1"])], "gold_in_question"),
        ([Task("a", "Where was Ada born?", "train", Gold({}))], "no_gold"),
        ([task("a", "Where was Ada born?"), task("b", "What did Bo ever see?")], ""),
    ],
)
def test_a_check_names_what_is_wrong_with_questions(tasks: list[Task], finding: str) -> None:
    found = question_findings(tasks, {DocId("d1"): "Bo Ek"})
    assert [each.name for each in found if each.count] == [finding] * bool(finding)


harness1 = pytest.fixture(command_in_process)


@pytest.fixture
def films(tmp_path: Path) -> Path:
    folder = tmp_path / "films"
    folder.mkdir()
    for document in corpus_of_films(40):
        (folder / f"{document.doc_id}.md").write_text(f"# {document.title}\n\n{document.text}\n")
    return folder


def test_tasks_of_a_folder_are_made_once_and_pass_their_check(films: Path, tmp_path: Path, harness1: Command) -> None:
    out, cache = tmp_path / "tasks", ("--cache", str(tmp_path / "cache"))
    command = ("tasks", "make", str(films), "--out", str(out), *cache, "--count")
    counts = json.loads(harness1(*command, "30", "--json").out)
    assert counts["tasks"] == sum(counts["kinds"].values()) == sum(counts["splits"].values()) == 30
    before = (out / "queries.jsonl").stat().st_mtime_ns
    assert (harness1(*command, "30").code, (out / "queries.jsonl").stat().st_mtime_ns) == (0, before)
    assert "it differs in count" in harness1(*command, "20").err
    checked = harness1("tasks", "check", str(out), "--out", str(tmp_path / "check"), "--sample", "8", *cache, "--json")
    assert checked.code == 0, checked
    [every] = [each for each in json.loads(checked.out)["played"] if each["kind"] == "all"]
    assert (every["tasks"], every["oracle"], every["nothing"]) == (8, 1.0, 0.0)
    assert (tmp_path / "check" / "view.html").is_file()


def test_kinds_of_findings_are_ignored_by_name(tmp_path: Path, harness1: Command) -> None:
    folder = tmp_path / "easy"
    texts = documents(("Ada Fenwick", BORN), ("Hull", "Hull is a port."), ("Cod", "A cod is a fish."))
    asked = [Task(f"q{at}", "Where was Ada born, in which harbour town?", gold=Gold({DocId("d0"): 1})) for at in (0, 1)]
    beir.write(folder, texts, asked)
    folders = ("--out", str(tmp_path / "c"), "--cache", str(tmp_path / "cache"))
    command = ("tasks", "check", str(folder), *folders, "--json")
    found = harness1(*command)
    names = [each["name"] for each in json.loads(found.out)["findings"]]
    assert found.code == 1
    assert {"near_duplicate", "answered_by_one_search"} <= {*names}
    ignored = [word for name in names for word in ("--ignore", name)]
    assert (harness1(*command, *ignored).code, harness1(*command, *ignored[2:]).code) == (0, 1)
    unknown = harness1(*command, "--ignore", "too_easy")
    assert unknown.code == 2
    assert "no kind of finding is called 'too_easy'; there are: gold_in_two_splits" in unknown.err


def test_a_corpus_without_names_gives_a_clear_error(tmp_path: Path, harness1: Command) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("nothing here")
    arguments = ("--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"))
    failed = harness1("tasks", "make", str(tmp_path / "docs"), *arguments)
    assert failed.code == 2
    assert "gives no task" in failed.err
    assert not (tmp_path / "out").exists()


def test_excerpts_are_taken_only_where_the_other_forms_do_not_suffice() -> None:
    run_on = (
        "the three founders made their pitch to the investors of Peter Marlow and soon his firm agreed to put four"
        " million into the startup of Demi Hassan the company was named after the computer of a novel"
    )
    corpus = documents(("", run_on), ("Ada Fenwick", BORN), ("Tom Arkwright", "Tom Arkwright was born in Leith."))
    forms = [task.metadata["form"] for task in make_tasks(corpus, searcher(corpus), 1000, 0)]
    assert forms.count("excerpt") == 1
    others = make_tasks(corpus, searcher(corpus), len(forms) - 1, 0)
    assert others
    assert "excerpt" not in [task.metadata["form"] for task in others]


TEMPLATE = "In which year was the director of Harbour Lights born?"
TITLES = {DocId("d0"): "Harbour Lights", DocId("d1"): "Tom Arkwright"}


def bridge_task(query: str = TEMPLATE, name: str = "a", kind: str = "bridge") -> Task:
    return Task(name, query, "train", Gold({DocId("d0"): 1, DocId("d1"): 1}, answers=("1921",)), {"kind": kind})


class Writing:
    """Answers with what a function makes of the template; fails after some answers."""

    def __init__(self, says: Callable[[str], str], answers: int = 99) -> None:
        self.says, self.answers, self.asked = says, answers, list[str]()

    async def complete(self, messages: Messages) -> Completion:
        assert messages[0]["content"] == SYSTEM
        if len(self.asked) == self.answers:
            raise InfrastructureFault("the server is away")
        self.asked.append(messages[1]["content"])
        return Completion(self.says(self.asked[-1]), "stop", 100, 10)


@pytest.mark.parametrize(
    ("question", "fault"),
    [
        ("When was the director who made Harbour Lights born?", ""),
        ("", "empty"),
        ("When was ____, the director of Harbour Lights, born?", "empty"),
        (f"When was the director of Harbour Lights born? {'Really? ' * 40}", "too long"),
        ("Was the director of Harbour Lights born in 1921?", "tells the answer"),
        ("When was Tom Arkwright, the director of Harbour Lights, born?", "names gold"),
        ("When was the director born?", "lost a name"),
        ("When was the director of the 1962 Harbour Lights born?", "changed a figure"),
        ("Harbour Lights?", "lost its words"),
    ],
)
def test_a_question_that_asks_something_else_is_refused(question: str, fault: str) -> None:
    assert fault_of(question, bridge_task(), TITLES) == fault


def test_a_claim_stays_what_it_claims() -> None:
    claim = bridge_task("Is this true? The harbour lights were never lit by Tom Arkwright.", kind="claim")
    assert fault_of("Were the harbour lights never lit by Tom Arkwright?", claim, TITLES) == ""
    assert fault_of("Were the harbour lights lit by Tom Arkwright?", claim, TITLES) == "changed a claim"


def test_a_question_is_taken_with_its_origin_and_the_template_is_kept_where_it_fails(tmp_path: Path) -> None:
    other = bridge_task("In which year was the writer of Harbour Lights born?", "b")
    model = Writing(lambda asked: "When was the director of Harbour Lights born?" if "director" in asked else "1921")
    counts: list[tuple[int, int, int]] = []
    (first, second), written = QuestionWriter("m", model).rewrite(
        [bridge_task(), other], TITLES, tmp_path, lambda *each: counts.append(each)
    )
    assert first.query == "When was the director of Harbour Lights born?"
    assert (first.metadata["origin"], first.metadata["template"]) == ("m", TEMPLATE)
    assert second == other
    assert (written.written, written.kept) == (1, {"tells the answer": 1})
    assert (written.prompt_tokens, written.output_tokens) == (200, 20)
    assert counts == [(1, 2, 110), (2, 2, 220)]
    assert all("1921" not in asked for asked in model.asked)


def test_what_was_answered_before_a_stop_is_not_asked_again(tmp_path: Path) -> None:
    tasks = [
        bridge_task(f"In which year was the director of Harbour Lights {place} born?", str(place)) for place in range(6)
    ]
    stopped = Writing(lambda asked: asked, answers=4)
    with pytest.raises(InfrastructureFault, match="left 2 of 6 requests unanswered"):
        QuestionWriter("m", stopped).rewrite(tasks, TITLES, tmp_path)
    rest = Writing(lambda asked: asked)
    told, written = QuestionWriter("m", rest).rewrite(tasks, TITLES, tmp_path)
    assert sorted([*stopped.asked, *rest.asked]) == [each.query for each in tasks]
    assert (len(told), written.written) == (6, 6)
    other = Writing(lambda asked: asked)
    QuestionWriter("n", other).rewrite(tasks, TITLES, tmp_path)
    assert len(other.asked) == 6


def test_a_served_model_writes_the_questions_of_a_folder_once(tmp_path: Path, harness1: Command) -> None:
    folder, out = tmp_path / "docs", tmp_path / "tasks"
    folder.mkdir()
    for number, film in enumerate(("The Quiet Bay", "Harbour Lights")):
        text = f"# {film}\n\n{film} is a 19{number + 5}1 drama film directed by Ada Fenwick.\n"
        (folder / f"{number}.md").write_text(text)
    asked: list[str] = []

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(json.loads(body)["messages"][1]["content"])
        said: dict[str, Any] = {"choices": [{"message": {"content": f"Tell me: {asked[-1].replace('____', 'what')}"}}]}
        return 200, json.dumps(said | {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()

    with imitating(answer) as url:
        spec = f"openai:m@{url}/v1"
        command = ("tasks", "make", str(folder), "--out", str(out), "--cache", str(tmp_path / "cache"), "--count", "4")
        made = harness1(*command, "--writer", spec, "--json")
        again = harness1(*command, "--writer", spec)
    assert made.code == again.code == 0, made
    written = json.loads(made.out)["writer"]
    assert written["written"] == len(asked) == len((out / REPLIES).read_text().splitlines())
    assert (written["prompt_tokens"], written["output_tokens"]) == (7 * len(asked), 3 * len(asked))
    questions = [json.loads(line)["text"] for line in (out / "queries.jsonl").read_text().splitlines()]
    assert all(each.startswith("Tell me: ") for each in questions)
    assert "it differs in writer" in harness1(*command).err
