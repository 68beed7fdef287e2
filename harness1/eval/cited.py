"""An answer to anybody's question from what a search found: a model's, with the passages that every sentence cites, and
whether they bear it out; or, without a model, the sentences of the passages themselves, the best first."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from harness1.config import Config
from harness1.data.formats import FORMATS
from harness1.data.indexing import Files
from harness1.env.environment import SearchEnv, call_engine
from harness1.episodes.jobs import EpisodeSetup
from harness1.episodes.single import Watch, play_one, question_task
from harness1.errors import InfrastructureFault, UsageError
from harness1.eval.answers import NamedModel, write_prompt
from harness1.http.model_endpoint import Completer, Messages, policy_endpoint, restore, strip_answer
from harness1.memory.confidence import NEAREST, UNCONVINCING, judge
from harness1.memory.question import content_terms
from harness1.memory.sentences import okapi, split
from harness1.memory.working_memory import question_names
from harness1.models.dialects import text_of
from harness1.models.endings import has_ended
from harness1.models.open import open_completer
from harness1.plain import unbroken
from harness1.records import Chunk, ChunkId, DocId, Episode, Hit, Record, Status, Task
from harness1.retrieval.corpus import approximate_tokens
from harness1.runs.journal import Journal, read_line_records

ASKED = "asked.jsonl"  # the answers in the folder of a run, one a line
NOTHING = "The passages do not say"  # what a model is told to write where they do not
OnText = Callable[[str], None]  # is called with all that a model has written so far
LONGEST = 20_000  # characters of a reply that are read
TOKENS, ANSWER_TOKENS = 400, 300  # most of the passages for a model (characters / 4), and of its answer
WINDOW = 8192  # tokens that a model of this machine is opened with at most, unless more passages are wanted
QUOTED = 10  # sentences of an answer without a model
SUPPORT = 0.5  # share of a sentence's words that what bears it out has


class Passage(Record):
    """What an answer cites by its number, from 1. `section`: the heading above it, or its page, slide or sheet."""

    chunk_id: ChunkId
    doc_id: DocId
    title: str
    text: str
    section: str = ""

    @property
    def shown(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text

    def section_at(self, place: int) -> str:
        """Return the heading above a place in `shown`."""
        return _heading(self.doc_id, self.shown[:place]) or self.section


class Citation(Record):
    """What a sentence rests on. `found`: the quoted words stand in the passage of that number, or, where none were
    quoted, a sentence of it bears the citing one out, and is quoted. `given`: by the model, and not looked for."""

    passage: int
    quote: str = ""
    found: bool = False
    section: str = ""
    given: bool = True


class Sentence(Record):
    """A sentence of an answer without its citations."""

    text: str
    citations: tuple[Citation, ...] = ()


class Answer(Record, kw_only=True):
    """What a model answered (`text`), by sentences; without one, the sentences of the passages, the best first.
    `convincing`: a document is surely enough one that the question asks for. `sufficient`: so it is, and a citation
    holds."""

    question: str
    model: str = ""
    text: str = ""
    sentences: tuple[Sentence, ...] = ()
    passages: tuple[Passage, ...] = ()
    finish_reason: str = ""
    episode_id: str = ""
    convincing: bool = True

    @property
    def sufficient(self) -> bool:
        return self.convincing and any(each.found for sentence in self.sentences for each in sentence.citations)

    def as_json(self, files: Files = lambda _: None) -> dict[str, Any]:
        """Return the answer as plain data, with the path of each passage that is in a file."""
        made = _fields(self)
        for passage, shown in zip(self.passages, made["passages"], strict=True):
            shown["path"] = str(path) if (path := files(passage.doc_id)) else None
        return made | {"sufficient": self.sufficient}

    def __str__(self) -> str:
        return "\n".join([self.text or self.question, *(line for line, _ in self.lines())])

    def lines(self, files: Files = lambda _: None) -> Iterator[tuple[str, Path | None]]:
        """Yield the sentences as lines, below each the passages that it cites and what is quoted of them; with the path
        of a file where a line is that. Without a model, of what is not convincing only the nearest sentences."""
        if not self.convincing:
            yield f"{UNCONVINCING}{'' if self.model or not self.sentences else '; the nearest sentences:'}", None
        shown = self.sentences if self.model or self.convincing else self.sentences[:NEAREST]
        for number, sentence in enumerate(shown, 1):
            yield f"{number:>3}  {sentence.text}", None
            if not sentence.citations:
                yield "     no passage bears it out", None
            for each in sentence.citations:
                if not 0 < each.passage <= len(self.passages):
                    yield f"     [{each.passage}] there is no such passage", None
                    continue
                passage = self.passages[each.passage - 1]
                section = f" › {_line(each.section)}" if each.section not in ("", passage.title) else ""
                yield f"     [{each.passage}] {_line(passage.title or passage.doc_id)}{section}", None
                file = files(passage.doc_id)
                yield unbroken(str(file or passage.doc_id)), file
                if not each.quote:
                    yield "     does not bear it out", None
                elif each.quote != sentence.text:
                    yield f'     "{_line(each.quote)}"{"" if each.found else " NOT FOUND there"}', None
        if not self.sufficient:
            yield "The passages do not suffice for an answer.", None


def _fields(record: Record) -> dict[str, Any]:
    """Return a record as plain data, with the fields that a line of JSON leaves out."""
    fields = msgspec.structs.asdict(record)
    return {name: [*map(_fields, value)] if isinstance(value, tuple) else value for name, value in fields.items()}


def _line(text: str) -> str:
    return " ".join(text.split())


_FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1|\Z)", re.MULTILINE | re.DOTALL)


def _heading(doc_id: str, text: str) -> str:
    """Return the last heading of a text, if its files have any; comments of code are none."""
    form = FORMATS.get(PurePath(doc_id).suffix.lower())
    found = [each[1] for each in form.title.finditer(_FENCED.sub("", text))] if form and form.title else []
    return found[-1].strip().strip(" \t#") if found else ""


def _place(hit: Hit) -> str:
    """Return the page, slide, sheet, message or attachment that the id of a chunk ends with, if any."""
    anchor = hit.chunk_id.removeprefix(hit.doc_id)
    if not re.match(r"#\w+=", anchor):
        return ""
    parts = re.split(r"&(?=\w+=)", anchor[1:])
    return ", ".join(part.replace("=", " ", 1) for part in parts if not part.startswith("part="))


async def find_passages(env: SearchEnv, episode: Episode, known: Answer | None = None) -> list[Passage]:
    """Return what an episode found of its documents, the best first, then what an earlier answer rests on."""
    found: dict[ChunkId, Passage] = {}
    for place in episode.curated:
        hits = env.state.memory.hits_of(place.unit_id)
        chunks: Sequence[Chunk] = ()
        if hits[-1].index and not _place(hits[-1]):  # the heading may stand before it
            chunks = await call_engine(partial(env.retriever.read, hits[0].doc_id), env.world.machine)
        for hit in hits:
            above = "\n".join(chunk.text for chunk in chunks[: hit.index])
            section = _place(hit) or _heading(hit.doc_id, above)
            text = unicodedata.normalize("NFC", hit.text)
            found[hit.chunk_id] = Passage(hit.chunk_id, hit.doc_id, hit.title, text, section)
    return list({**found, **{each.chunk_id: each for each in (known.passages if known else ())}}.values())


def follow(question: str, known: Answer | None) -> str:
    """Return a question that names what it is about: one without a name of its own is about what was cited before."""
    if known is None or question_names(question):
        return question
    cited = [each.passage for sentence in known.sentences for each in sentence.citations if each.found]
    titles = [known.passages[at - 1].title for at in dict.fromkeys(cited) if 0 < at <= len(known.passages)]
    return f"{question} ({'; '.join(titles[:2])})" if any(titles) else question


class Spot(NamedTuple):
    """A sentence of the passage of a `number`, its `start` there, its section, and its terms with the title's."""

    number: int
    start: int
    text: str
    section: str
    terms: list[str]

    @property
    def cited(self) -> Citation:
        return Citation(self.number, self.text, True, self.section)


def best_sentences(question: str, passages: Sequence[Passage]) -> list[Spot]:
    """Return the sentences of passages that have words of a question, or whose titles have, the best first: by Okapi
    BM25 with the title before each, the share of the words, and the order of the passages, which count alike."""
    spots, asked = list[Spot](), content_terms(question)
    for number, passage in enumerate(passages, 1):
        end = len(passage.shown) - len(passage.text)
        for text in split(passage.text):
            start = passage.shown.index(text, end)
            end = start + len(text)
            if any(map(str.isalnum, text)) and not _heading(passage.doc_id, text):
                section = passage.section_at(start)
                terms = content_terms(f"{passage.title} {section} {text}")
                spots.append(Spot(number, start, text, section, terms))
    shares = [len({*asked}.intersection(each.terms)) / len({*asked} or [0]) for each in spots]
    scores = okapi([each.terms for each in spots], asked)
    top = max(scores, default=0.0) or 1.0
    values = [scores[at] / top + shares[at] - spots[at].number / len(passages) for at in range(len(spots))]
    return [spots[at] for at in sorted(range(len(spots)), key=lambda at: -values[at]) if shares[at]]


class Answerer(NamedTuple):
    """Answers from the best sentences: a model, which is given at most `tokens` of them (characters / 4), or none."""

    model: NamedModel | None = None
    tokens: int = TOKENS

    async def answer_episode(
        self, env: SearchEnv, episode: Episode, known: Answer | None = None, on_text: OnText = lambda _: None
    ) -> Answer:
        """Return the answer to an episode's question from what it delivered, and from what an earlier one rests on."""
        answer = await self.answer(episode.task.query, await find_passages(env, episode, known), on_text)
        convincing = judge(env.state.memory, episode.curated).convincing
        return replace(answer, episode_id=episode.episode_id, convincing=convincing)

    async def answer(self, question: str, passages: Sequence[Passage], on_text: OnText = lambda _: None) -> Answer:
        """Return a checked answer. `on_text`: called with all that was written so far. Raises as the endpoint."""
        spots = best_sentences(question, passages)
        if self.model is None:
            best = tuple(Sentence(spot.text, (spot.cited,)) for spot in spots[:QUOTED])
            return Answer(question=question, sentences=best, passages=tuple(passages))
        room, chosen = self.tokens, dict[int, list[Spot]]()
        for spot in spots:
            room -= approximate_tokens(spot.text)
            if room < 0 and chosen:
                break
            chosen.setdefault(spot.number, []).append(spot)
        numbers = sorted(chosen)
        held, parts = tuple(passages[number - 1] for number in numbers), list[tuple[str, str]]()
        for place, number in enumerate(numbers):
            texts = [spot.text for spot in sorted(chosen[number], key=lambda spot: spot.start)]
            parts.append((f"passage {place + 1}", "\n".join([held[place].title, *texts]).strip()))
        text, ended = f"{NOTHING}.", ""
        if held:
            text, ended = await _complete(self.model, write_prompt("cited", *parts, ("question", question)), on_text)
        on_text(text)
        made = Answer(question=question, model=self.model.name, text=text, passages=held, finish_reason=ended)
        return replace(made, sentences=read_cited(text, held))


async def _complete(model: NamedModel, messages: Messages, on_text: OnText) -> tuple[str, str]:
    def read(said: str) -> str:
        return restore(strip_answer(said))[:LONGEST]

    def ended(message: dict[str, Any]) -> bool:
        on_text(read(text_of(message.get("content"))))
        return has_ended(message, ())

    if isinstance(model.completer, Completer):
        completion = await model.completer.complete(messages, ended)
    else:
        completion = await model.completer.complete(messages)
    return read(completion.text), completion.finish_reason


def open_answerer(spec: str, config: Config, tokens: int = TOKENS, answer_tokens: int = ANSWER_TOKENS) -> Answerer:
    """Open a model by its spec, with the key of `machine.model`; empty: none. Raises as `open_completer`."""
    if not spec:
        return Answerer()
    window = min(config.env.context_window, max(WINDOW, 3 * tokens + answer_tokens))  # small models read no more
    env = replace(config.env, context_window=window)
    completer = open_completer(spec, replace(config, env=env), answer_tokens, policy_endpoint)
    return Answerer(NamedModel(spec, completer), tokens)


def ask(
    question: str,
    setup: EpisodeSetup,
    answerer: Answerer,
    out: Path | None,
    known: Answer | bool | None = None,
    *,
    watch: Watch = lambda _: nullcontext(),
    on_text: OnText = lambda _: None,
    on_torn: Callable[[Path, int], None] = lambda out, torn: None,
) -> tuple[Answer, Path]:
    """Search, answer, and keep both in a run folder, which is returned; raise as `play_one`, and InfrastructureFault if
    the search is invalid. `known`: the answer that this question follows; True: the last one in the folder."""

    earlier = [known] if isinstance(known, Answer) else []

    def task_in(folder: Path) -> Task:
        if known is True:
            if not (kept := answers_in(folder)):
                raise UsageError(f"{folder} holds no answer to follow: ask a first question without --follow")
            earlier.append(kept[-1])
        return question_task(follow(question, next(iter(earlier), None)))

    episode, env, out = play_one(task_in, setup, out, watch=watch, on_torn=on_torn)
    if episode.status is Status.INFRA_ERROR:
        raise InfrastructureFault(f"the search is invalid: {episode.error}")
    answer = asyncio.run(answerer.answer_episode(env, episode, next(iter(earlier), None), on_text))
    with Journal(out, ASKED) as journal:
        journal.write(msgspec.json.encode(answer))
    return answer, out


def answers_in(folder: Path) -> list[Answer]:
    """Return the answers kept in a run folder; raise SchemaError if a line is none."""
    path = folder / ASKED
    return list(read_line_records(path, Answer, "an answer")) if path.is_file() else []


_NUMBERS = r"(?:passages? +)?(\d{1,4}(?: *+, *+\d{1,4})*+)"
_WORDS = r"""(?:[:,]?\s?["“«'‘](.{1,2000}?)["”»'’] ?|:\s?([^\]\n]{1,2000}))?"""
_CITED = re.compile(rf"\[{_NUMBERS} ?{_WORDS}\]", re.IGNORECASE | re.DOTALL)
"""What `answers.toml` asks for, `[2: "words"]`, and what models write instead: `[1]`, `[1, 2]`, `[1: words]`."""
_NOTHING = re.compile(r"the passages? (?:do|does) not (?!only\b|just\b)[^.\n]*\.?", re.IGNORECASE)
_QUOTED = re.compile(r"[\"“«]([^\"“”«»]{8,500})[\"”»]\W*\Z")
_MARK, _LAST = 0xF0000, 0xFFFFD  # private characters, which stand for citations while sentences are cut
_MARKS = f"[{chr(_MARK)}-{chr(_LAST)}]"
_LATE = re.compile(rf"([.!?。！？][\"'”’)]*)({_MARKS}+)")
_BULLET = re.compile(r"^ ?(?:[-*•]|\d{1,2}[.)]) ", re.MULTILINE)


def read_cited(said: str, passages: Sequence[Passage]) -> tuple[Sentence, ...]:
    """Read the sentences of an answer and what they cite, checked; support is looked for where one cites nothing."""
    if _NOTHING.fullmatch(said):
        return ()
    marks = list[re.Match[str]]()

    def keep(found: re.Match[str]) -> str:
        marks.append(found)
        return chr(_MARK + len(marks) - 1)

    # A run of blanks is one, lest it take the square of the time.
    said = re.sub(r"\s++", lambda found: "\n" if "\n" in found[0] else " ", re.sub(_MARKS, "", said))
    held = re.sub(rf"\s({_MARKS})", r"\1", _CITED.sub(keep, _BULLET.sub("", said)))
    held = _LATE.sub(r"\2\1", held)
    sentences = list[Sentence]()
    for piece in split(held):
        text = re.sub(_MARKS, "", piece).strip()
        cited = list[Citation]()
        for found in (marks[ord(mark) - _MARK] for mark in re.findall(_MARKS, piece)):
            quoted = _QUOTED.search(text)
            quote = found[2] or found[3] or (quoted[1] if quoted else "")
            cited += [_check(int(number), quote, text, passages) for number in re.findall(r"\d+", found[1])]
        if not cited and (borne := _bearing(text, passages)):
            cited = [replace(borne, given=False)]
        if any(map(str.isalnum, text)):
            sentences.append(Sentence(text, tuple(cited)))
    return tuple(sentences)


def _check(number: int, quote: str, sentence: str, passages: Sequence[Passage]) -> Citation:
    if not 0 < number <= len(passages):
        return Citation(number, quote)
    passage = passages[number - 1]
    if quote:
        start = find_quote(quote, passage.shown)
        return Citation(number, quote, start is not None, passage.section_at(start or 0))
    borne = _bearing(sentence, [passage])
    return replace(borne, passage=number) if borne else Citation(number)


def _bearing(sentence: str, passages: Sequence[Passage]) -> Citation | None:
    """Return the sentence of passages that has most words of another, if that is enough, and all of its numbers."""
    wanted = set(content_terms(sentence))
    figures = {term for term in wanted if any(map(str.isdigit, term))}
    spots = [spot for spot in best_sentences(sentence, passages) if figures.issubset(spot.terms)]
    best = max(spots, key=lambda spot: len(wanted.intersection(spot.terms)), default=None)
    return best.cited if best and len(wanted.intersection(best.terms)) >= SUPPORT * len(wanted) else None


_ALIKE = str.maketrans("‘’‛`´“”„«»‹›–—−‐", "'''''\"\"\"\"\"<>----")
_GAP = "..."


@lru_cache(maxsize=256)
def _plain(text: str) -> tuple[str, list[int]]:
    """Return a text for comparison, and the places of its characters: in one form and case, without blanks."""
    found = [
        (letter, place)
        for place, whole in enumerate(unicodedata.normalize("NFC", text))
        for letter in unicodedata.normalize("NFKC", whole).casefold().translate(_ALIKE)
        if not letter.isspace() and unicodedata.category(letter) != "Cf"
    ]
    return restore("".join(letter for letter, _ in found)), [place for _, place in found]


_NUMBER_GOES_ON = re.compile(r"(?<=\d)[.,]?\d|(?<=\d[.,])\d")


def _is_within(text: str, at: int) -> bool:
    """Return whether a place is within a number or a word of letters that have capitals: others set no spaces."""
    around = text[max(0, at - 1) : at + 1]
    is_word = len(around) == 2 and all(letter.lower() != letter.upper() for letter in around)
    return is_word or _NUMBER_GOES_ON.match(text, at) is not None


def find_quote(quote: str, text: str) -> int | None:
    """Return where a quotation begins in a text (in NFC), whatever the forms of its letters, quotes and blanks; what
    stands around `...` follows one another, and is no part of a word or number. None if it does not stand there."""
    plain, places = _plain(text)
    begin, at = None, 0
    for part in filter(None, (part.strip(".,;:") for part in _plain(quote)[0].split(_GAP))):
        while (found := plain.find(part, at)) >= 0:
            at, start = found + 1, places[found]
            if not _is_within(text, start) and not _is_within(text, places[found + len(part) - 1] + 1):
                break
        else:
            return None
        begin, at = start if begin is None else begin, found + len(part)
    return begin
