"""The benchmarks of the paper by name, in their official formats; `benchmarks.toml` has what users are told of each."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import resources
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urldefrag

import msgspec
from msgspec import Meta

from harness1.data import tables, trec
from harness1.data.corpora import Located, Placed, document_of, open_corpus, pool_documents, source_of, tasks_of
from harness1.data.source import DuplicateId, Fault, Made, Source, drop_repeated, make_each
from harness1.data.tables import Row, identifier
from harness1.errors import CorpusError, UsageError
from harness1.records import ChunkId, DocId, Gold, Record, Task, Unit
from harness1.retrieval.corpus import Document
from harness1.retrieval.engines.web import page_url

HOTPOT_FILES = {
    "dev": (
        ("hotpot_dev_distractor_v*.json", "distractor/validation-*.parquet"),
        ("hotpot_dev_fullwiki_v*.json", "fullwiki/validation-*.parquet"),
    ),
    "train": (("hotpot_train_v*.json", "distractor/train-*.parquet"),),
}  # the files of each split: the first of each group that exists. The two of `dev` differ only in their contexts.


def open_hotpotqa(root: Path, fault: Fault) -> Source:
    """Open HotpotQA (Yang et al. 2018), in a folder or one file; its pairs are lists, or on the hub lists under two
    names. The paragraphs of all contexts are the corpus: one document for each title."""
    if root.is_file():
        files = {"train" if "train" in root.name else "dev": [root]}
    else:
        of_all = {name: [tables.find_files(root, *each) for each in groups] for name, groups in HOTPOT_FILES.items()}
        files = {split: [*chain.from_iterable(groups)] for split, groups in of_all.items() if any(groups)}
    if not files:
        raise CorpusError(f"{root} has no questions of HotpotQA: expected hotpot_dev_distractor_v1.json or its like")
    problems: list[str] = []

    def documents() -> Iterator[Placed]:
        every = tables.rows([*chain.from_iterable(files.values())], fault)
        for where, paragraphs in make_each(every, _paragraphs, fault):
            yield from ((where, document) for document in paragraphs)

    splits = {split: partial(_hotpot_tasks, paths, split, fault) for split, paths in files.items()}
    return source_of("hotpotqa", root, pool_documents(documents, problems), splits, fault, problems)


def document_id(title: str) -> DocId:
    """Return the id of an article: its title with underscores, as in Wikipedia's addresses."""
    return DocId("_".join(title.split()))


def _paragraphs(where: str, row: Row) -> list[Document]:
    pairs = _pairs(where, row, "context", "sentences", list[tuple[str, list[str]]])
    if not all(title.strip() for title, _ in pairs):
        raise CorpusError(f"{where}: a paragraph without a title")
    return [Document(document_id(title), title, "".join(sentences).strip()) for title, sentences in pairs]


def _hotpot_tasks(files: list[Path], split: str, fault: Fault) -> Located:
    def read(where: str, row: Row, number: int) -> Task:
        titles = [title for title, _ in _pairs(where, row, "supporting_facts", "sent_id", list[tuple[str, Any]])]
        relevant, answer = dict.fromkeys(map(document_id, titles), 1), tables.text_of(where, row, "answer")
        metadata: Row = {key: row[key] for key in ("type", "level") if key in row}
        query, gold = tables.text_of(where, row, "question"), Gold(relevant, answers=(answer,))
        return Task(identifier(where, row), query, split, gold, metadata)

    asked: dict[str, tuple[Path, str]] = {}
    for path in files:
        for where, task in tasks_of(tables.rows([path], fault), fault, read):
            first, query = asked.setdefault(task.task_id, (path, task.query))
            if first == path:
                yield where, task
            elif query != task.query:
                fault(DuplicateId(f"{where}: {first.name} asks something else under the id {task.task_id!r}"))


def _pairs(where: str, row: Row, key: str, second: str, kind: type[Made]) -> Made:
    value = row.get(key)
    if isinstance(value, dict):
        titles, others = tables.convert(f"{where}: {key}", [value.get("title"), value.get(second)], list[list[Any]])
        if len(titles) != len(others):
            raise CorpusError(f"{where}: {key} is not a list of pairs")
        value = [*zip(titles, others, strict=True)]
    return tables.convert(f"{where}: {key}", value, kind)


SAVED_PAGES = ("corpus.jsonl", "corpus.jsonl.gz", "corpus.parquet")
"""Pages that a user has saved: the address as id, a title and a text."""
SETS = ("30_docs", "20_docs", "12_docs")
LABELS = ("topic", "freshness", "question_types", "effective_year", "search_results")


class _Page(msgspec.Struct):
    url: str | None = None
    title: str | None = None
    text: str | None = None


def page_id(where: str, address: Any) -> DocId:
    """Return a page's address as the web retriever spells it. Raises CorpusError: it is no address of a page."""
    url = page_url(address) if isinstance(address, str) else None
    if url is None:
        raise CorpusError(f"{where}: {address!r} is not the address of a page")
    return DocId(url)


def _sealqa_task(where: str, row: Row, number: int, pages: Sequence[object] = ()) -> Task:
    """Return a question of SealQA (Pham et al. 2025): `question`, `answer`, `urls` (the relevant pages), and labels.
    Rows have no id, so their number from 0 serves, as in the published evaluation. `pages`: in place of `urls`."""
    relevant = [page_id(where, address) for address in pages or tables.list_of(where, row, "urls")]
    gold = Gold(dict.fromkeys(relevant, 1), answers=(tables.text_of(where, row, "answer"),))
    metadata = {label: row[label] for label in LABELS if row.get(label) is not None}
    return Task(str(number), tables.text_of(where, row, "question"), "test", gold, metadata)


def open_asked_on_the_web(
    name: str, task: Callable[[str, Row, int], Task], patterns: Sequence[str], root: Path, fault: Fault
) -> Source:
    """Open questions with one split, `test`, over the pages that a user has saved beside them, or else the web."""
    files = tables.require_files(root, "questions", *patterns)
    pages = tables.find_files(root, *SAVED_PAGES) if root.is_dir() else ()
    corpus = open_corpus(pages, fault, lambda name: DocId(page_url(name) or name)) if pages else None
    return source_of(name, root, corpus, {"test": lambda: tasks_of(tables.rows(files, fault), fault, task)}, fault)


def open_longseal(root: Path, fault: Fault) -> Source:
    """Open LongSeal of SealQA: the pages that hold the answer are `golds`; those and the largest set of distractors
    are the corpus."""
    patterns = ("longseal.parquet", "longseal*.parquet", "longseal/test-*.parquet", "longseal.jsonl", "longseal.json")
    files = tables.require_files(root, "questions", *patterns)
    problems: list[str] = []

    def documents() -> Iterator[Placed]:
        for where, pages in make_each(tables.rows(files, fault), _pages, fault):
            for page in pages:
                url, title, text = page_url(page.url or ""), page.title or "", page.text or ""
                if url is None or not (title + text).strip():
                    problems.append(f"{where}: a page without {'text' if url else 'an address'}")
                else:
                    yield where, Document(DocId(url), title, text)

    def task(where: str, row: Row, number: int) -> Task:
        pages = [page for page in tables.list_of(where, row, "golds") if isinstance(page, dict)]
        return _sealqa_task(where, row, number, [page.get("url") for page in pages])

    splits = {"test": lambda: tasks_of(tables.rows(files, fault), fault, task)}
    return source_of("longseal", root, pool_documents(documents, problems), splits, fault, problems)


def _pages(where: str, row: Row) -> list[_Page]:
    distracting = next((name for name in SETS if row.get(name) is not None), SETS[0])
    pages = [page for name in ("golds", distracting) for page in tables.list_of(where, row, name)]
    return tables.convert(f"{where}: pages", pages, list[_Page])


NUMBER_KEYS = ("", "Unnamed: 0", "id", "index")
LINK = "wikipedia_link_"
_BETWEEN = re.compile(r"(?<![\s,;])[\s,;]++(?=https?://)")


def addresses(cell: str) -> list[str]:
    """Return the addresses in a cell, separated by commas, blanks or line breaks; an address may itself hold commas."""
    pieces = (piece.split() for piece in _BETWEEN.split(cell.strip()))
    return [words[0].strip("'\"[]").rstrip(",;") for words in pieces if words and "://" in words[0]]


def _frames_task(where: str, row: Row, number: int) -> Task:
    """Return a question of FRAMES (Krishna et al. 2024), over 2 to 15 articles of Wikipedia: in `wikipedia_link_1` and
    so on, or in `wiki_links`, a list as in Python. A cell may hold several addresses, and words after one."""
    cells = tables.list_of(where, row, "wiki_links") if row.get("wiki_links") else []
    cells = cells or [value for key, value in row.items() if key.startswith(LINK) and value]
    if not all(isinstance(cell, str) for cell in cells):
        raise CorpusError(f"{where}: an address in wiki_links is not a text")
    relevant = [page_id(where, address) for cell in cells for address in addresses(cell)]
    task_id = identifier(where, row, NUMBER_KEYS) if any(key in row for key in NUMBER_KEYS) else str(number)
    gold = Gold(dict.fromkeys(relevant, 1), answers=(tables.text_of(where, row, "Answer"),))
    metadata = {"reasoning_types": row["reasoning_types"]} if row.get("reasoning_types") else {}
    return Task(task_id, tables.text_of(where, row, "Prompt"), "test", gold, metadata)


SEED, TRAIN_SHARE = 42, 0.8
"""The split of the published training code: sorted ids, shuffled by Python's generator, with the first 80 % for
training."""
TOPICS = ("topics-qrels/queries.tsv", "queries.tsv")
GOLD = ("topics-qrels/qrel_golds.txt", "qrel_golds.txt", "topics-qrels/qrel_gold.txt", "qrel_gold.txt",
        "qrels_gold.txt")  # fmt: skip
EVIDENCE = ("topics-qrels/qrel_evidence.txt", "qrel_evidence.txt", "qrels_evidence.txt")
CORPUS = ("corpus/**/*.parquet", "corpus.parquet", "corpus.jsonl", "corpus.jsonl.gz",
          "browsecomp-plus-corpus/**/*.parquet", "corpora/browsecompplus/test/**/*.parquet",
          "corpora/browsecompplus/**/*.parquet", "data/*.parquet")  # fmt: skip
ANSWERS = ("data/browsecomp_plus_decrypted.jsonl", "browsecomp_plus_decrypted.jsonl", "answers.jsonl")


def open_browsecomp_plus(root: Path, fault: Fault) -> Source:
    """Open BrowseComp-Plus (Chen et al. 2025): all questions, or split as in the paper. Its authors ask that they
    never appear online as plain text: answers that the user has decrypted are read into `Gold`, and never written."""
    topics = tables.require_files(root, "questions", *TOPICS)[0]
    gold, evidence = (tables.require_files(root, "judgements", *names)[0] for names in (GOLD, EVIDENCE))
    corpus = open_corpus(tables.require_files(root, "corpus", *CORPUS), fault)
    decrypted = tables.find_files(root, *ANSWERS)

    def tasks(split: str) -> Located:
        questions = list(tables.tsv_rows(topics, fault, ("query_id", "query")))
        known = {row["query_id"] for _, row in questions}
        final, needed = (trec.read_qrels(path, known, "questions", fault) for path in (gold, evidence))
        lines = make_each(tables.rows(decrypted[:1], fault), _answer, fault)
        answers = dict(pair for _, pair in drop_repeated(lines, itemgetter(0), fault))
        taught = training_ids(known)

        def task(where: str, row: Row, number: int) -> Task | None:
            task_id = row["query_id"]
            if split != "all" and (task_id in taught) != (split == "train"):
                return None
            if not task_id.strip():
                raise CorpusError(f"{where}: needs an id before the first tab")
            found = Gold(
                relevant=dict.fromkeys((*final.get(task_id, ()), *needed.get(task_id, ())), 1),
                answer_docs=tuple(final.get(task_id, ())),
                answers=(answers[task_id],) if task_id in answers else (),
            )
            return Task(task_id, tables.text_of(where, row, "query"), split, found)

        return tasks_of(iter(questions), fault, task)

    splits = {split: partial(tasks, split) for split in ("all", "test", "train")}
    return source_of("browsecomp_plus", root, corpus, splits, fault, secret_answers=True)


def _answer(where: str, row: Row) -> tuple[str, str]:
    return identifier(where, row, ("query_id",)), tables.convert(f"{where}: answer", row.get("answer"), str)


def training_ids(task_ids: Iterable[str]) -> set[str]:
    """Return the questions that the paper trains on; the others are its test split."""
    names = sorted(task_ids)
    random.Random(SEED).shuffle(names)
    return set(names[: int(len(names) * TRAIN_SHARE)])


SPLITS = ("test", "train")
FORMATS = ("parquet", "jsonl", "json")
ReadGold = Callable[[str, Row], Gold]


def open_context1(name: str, read_gold: ReadGold, root: Path, fault: Fault, *, shared: bool = False) -> Source:
    """Open a benchmark in the layout of Context-1's data generation (Web, Patents, SEC). The released
    data/train-*.parquet has the training questions of all three. `shared`: training and test questions share a
    corpus; if not, only the split whose corpus is present has tasks: the test split, if both are."""
    names = ("corpus.parquet", "corpus/**/*.parquet", "corpus.jsonl", "corpus.jsonl.gz", f"corpora/{name}/**/*.parquet")
    own = {each: tables.find_files(root, f"corpora/{name}/{each}/**/*.parquet") for each in SPLITS}
    only = next((each for each in SPLITS if own[each]), None)
    corpus = own[only] if only else tables.require_files(root, "corpus", *names)
    places = [f"{place}{{}}.{kind}" for place in ("", "queries/", f"queries/{name}/") for kind in FORMATS]
    places += [f"queries/{name}/**/{{}}*.parquet", "data/{}-*.parquet"]
    asked = [each for each in SPLITS if shared or only in (None, each)]
    found = {each: tables.find_files(root, *(place.format(each) for place in places)) for each in asked}
    splits = [each for each, files in found.items() if files]
    if not splits:
        raise CorpusError(f"{root} has no questions of {name}: expected {only or 'test'}.parquet")

    def tasks(split: str) -> Located:
        def task(where: str, row: Row, number: int) -> Task | None:
            if row.get("dataset_name", name) != name or row.get("stage", "rl") != "rl":
                return None  # the released training file holds other benchmarks, and a teacher's episodes
            task_id = identifier(where, row, ("query_id",))
            return Task(task_id, tables.text_of(where, row, "query"), split, read_gold(where, row))

        return tasks_of(tables.rows(found[split], fault), fault, task)

    return source_of(name, root, open_corpus(corpus, fault), {each: partial(tasks, each) for each in splits}, fault)


class _Fact(msgspec.Struct):
    chunk_ids: Annotated[tuple[Annotated[ChunkId, Meta(min_length=1)], ...], Meta(min_length=1)]
    is_final_answer: Any = False


def document_gold(where: str, row: Row) -> Gold:
    """Return the relevant documents, and those among them that hold the answer."""
    relevant = _document_ids(where, tables.list_of(where, row, "document_ids", "document_ids_json"))
    final = tables.list_of(where, row, "gold_document_ids") if row.get("gold_document_ids") is not None else []
    answer_docs = tuple(dict.fromkeys(_document_ids(where, final)))
    return Gold(relevant=dict.fromkeys((*relevant, *answer_docs), 1), answer_docs=answer_docs, answers=_answers(row))


def fact_gold(where: str, row: Row) -> Gold:
    """Return facts, each with the chunks that state it, and the documents of these chunks."""
    listed = tables.list_of(where, row, "document_ids", "document_ids_json")
    facts = tables.convert(f"{where}: document_ids", listed, list[_Fact])
    stated = tuple(tuple(dict.fromkeys(fact.chunk_ids)) for fact in facts)
    final = tuple(number for number, fact in enumerate(facts) if fact.is_final_answer)
    documents = [dict.fromkeys(map(document_of, chunks)) for chunks in stated]
    return Gold(
        relevant=dict.fromkeys((doc_id for each in documents for doc_id in each), 1),
        answer_docs=tuple(dict.fromkeys(doc_id for number in final for doc_id in documents[number])),
        facts=stated,
        answer_facts=final,
        answers=_answers(row),
    )


def _document_ids(where: str, values: list[Any]) -> list[DocId]:
    names = map(str, tables.convert(f"{where}: document_ids", values, list[int | Annotated[str, Meta(min_length=1)]]))
    return [DocId(urldefrag(name).url if "://" in name else name) for name in names]


def _answers(row: Row) -> tuple[str, ...]:
    answer = row.get("answer")
    return (answer,) if isinstance(answer, str) and answer.strip() else ()


SEAL0_FILES = ("seal-0.parquet", "seal_0*.parquet", "seal_0/test-*.parquet", "seal-0.jsonl", "seal-0.json")
FRAMES_FILES = ("test.tsv", "test*.parquet", "frames*.tsv", "test.jsonl", "test.json")
READERS: dict[str, Callable[[Path, Fault], Source]] = {
    "browsecomp_plus": open_browsecomp_plus,
    "web": partial(open_context1, "web", document_gold),
    "patents": partial(open_context1, "patents", document_gold),
    "sec": partial(open_context1, "sec", fact_gold, shared=True),
    "longseal": open_longseal,
    "seal0": partial(open_asked_on_the_web, "seal0", _sealqa_task, SEAL0_FILES),
    "frames": partial(open_asked_on_the_web, "frames", _frames_task, FRAMES_FILES),
    "hotpotqa": open_hotpotqa,
}


class Hub(Record):
    """Files of a dataset on the Hugging Face hub: patterns of names, and the folder that each goes to."""

    repository: str
    patterns: tuple[str, ...]
    folder: str = ""


class Benchmark(Record):
    """A benchmark. `files` says what a folder must hold; `verified` says on which data the reader was tried."""

    name: str
    what: str
    size: str
    licence: str
    origin: str
    files: tuple[str, ...]
    verified: str
    unit: Unit = "document"  # the unit that the paper scores, which `index.unit` must equal
    hub: tuple[Hub, ...] = ()
    by_hand: str = ""  # files that no hub has, and how to get them
    secret_answers: bool = False
    """True if neither questions nor answers may be published; also of the source that its reader returns."""


_CARDS = resources.files(__package__).joinpath("benchmarks.toml").read_bytes()
BENCHMARKS = {each.name: each for each in msgspec.toml.decode(_CARDS, type=dict[str, list[Benchmark]])["benchmark"]}


def benchmark_named(name: str) -> Benchmark:
    """Return the benchmark with a name. Raises UsageError: there is no such benchmark."""
    if name not in BENCHMARKS:
        raise UsageError(f"there is no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
