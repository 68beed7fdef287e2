"""Whatever a document holds, an episode goes on: all that is shown of it has a bound, and no context is over its
budget."""

from __future__ import annotations

from typing import Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness1.config import Env, Rendering
from harness1.env.environment import SearchEnv
from harness1.env.pieces import ApproximateCounter, Piece
from harness1.records import Chunk, ChunkId, DocId, ToolCall
from harness1.retrieval.protocol import BadPattern
from harness1.tools.discovery import TITLE_CHARACTERS, UNCUT_CHARACTERS, fit_window, show_text
from harness1.tools.tool import PLAIN
from tests.support import WordRetriever, call, chunk, curate, hit, make_env, play, recount, search

Order = Literal["paper", "stable_first", "epoch", "transcript"]
ORDERS: tuple[Order, ...] = ("paper", "stable_first", "epoch", "transcript")
RESERVE = 300
STRETCHES = (
    *("word ", "x", "\n", "\x1b[31m", "A. ", "\u202e\u0000"),
    *("Ada Byron. ", "aB", "\u2028", "(E1) ", "[D1] ", "\U0001f600"),
)


class ByteCounter(ApproximateCounter):
    """One token for each byte: as many as a tokenizer can need."""

    hash = "bytes"

    def piece(self, piece: Piece) -> int:
        return len(piece.text.encode("utf-8", "surrogatepass"))


@st.composite
def stretches(draw: st.DrawFn, longest: int) -> str:
    """A short text that is repeated up to a length."""
    what = draw(st.one_of(st.sampled_from(STRETCHES), st.text(min_size=1, max_size=5)))
    size = draw(st.integers(0, longest))
    return (what * (size // len(what) + 1))[:size]


@st.composite
def corpora(draw: st.DrawFn, longest: int = 200_000) -> list[Chunk]:
    """Chunks that a search for `river` finds, with hostile titles, ids and texts, some parts of one document."""
    made = []
    for number in range(draw(st.integers(1, 12))):
        doc_id = draw(st.sampled_from(("d", f"d{number}", f"{number}" + "i" * longest)))
        title, text = f"{draw(stretches(longest))} river", f"river {draw(stretches(longest))}"
        made.append(Chunk(ChunkId(f"{doc_id}#{number}"), DocId(doc_id), number, title, text))
    return made


ACTIONS = (
    search("river"),
    call("fan_out_search", queries=["river", "word river", "Ada river"]),
    call("grep_corpus", pattern="river"),
    call("read_document", doc_id="D1"),
    call("review_docs", doc_ids=["D1", "D2", "D3"]),
    call("verify", doc_ids=["D1", "D2", "D3"], claim="The river is a word."),
    curate(add_ids=["D1", "D2"]),
    search("word river"),
)


def sized(window: int, order: Order, handles: bool) -> Env:
    env = Env(context_window=window, generation_reserve=RESERVE, rendering=Rendering(order=order))
    return env.switch(entity_handles=handles)


def lasts(env: SearchEnv, *actions: ToolCall) -> None:
    """Play the actions; no context is missing or over its budget."""
    steps = play(env, *actions, query="Which river?")
    for step in steps:
        assert step.context is not None, step.done
        assert recount(env, step.context) <= step.context.budget.used <= step.context.budget.limit


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(corpora(), st.sampled_from(ORDERS), st.booleans())
def test_a_search_ends_no_episode_in_the_smallest_window(chunks: list[Chunk], order: Order, handles: bool) -> None:
    window = make_env(sized(100_000, order, handles)).renderer.smallest_window()
    lasts(make_env(sized(window, order, handles), chunks), ACTIONS[0])


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(corpora(20_000), st.sampled_from(ORDERS[:3]), st.permutations(ACTIONS), st.sampled_from(["characters", "bytes"]))
def test_no_document_ends_an_episode(chunks: list[Chunk], order: Order, actions: list[ToolCall], counted: str) -> None:
    counter = ByteCounter() if counted == "bytes" else ApproximateCounter()
    window = 2600 if counted == "characters" else 12_000
    config = Env(context_window=window, generation_reserve=RESERVE, rendering=Rendering(order=order))
    lasts(make_env(config, chunks, counter=counter), *actions)


def test_a_long_title_is_cut_wherever_it_is_shown() -> None:
    chunks = [chunk("a", "river one", "t" * 133_000), chunk("b", "river two " * 300, "u" * 8_000)]
    for window, longest in ((32_768, TITLE_CHARACTERS), (2_600, 4 * ((2_600 - RESERVE) // 16))):
        env = make_env(Env(context_window=window, generation_reserve=RESERVE), chunks)
        steps = play(env, search("river"), *[call("review_docs", doc_ids=["D1"])] * 12)
        for step in steps:
            titles = [document.title for document in step.context.view.documents.values()]
            assert max(map(len, titles)) == longest
            assert max(len(piece.text) for piece in step.context.pieces if "ttt" in piece.text) < longest + 300


def test_hits_are_counted_as_they_are_shown_and_one_that_would_fill_the_context_is_cut() -> None:
    env = Env(context_window=4_300, generation_reserve=RESERVE)
    plain = [hit(str(number), "word " * 20, "A title") for number in range(60)]
    titled = [hit(str(number), "word", "t" * 900) for number in range(60)]
    assert len(fit_window(plain, PLAIN, (), env)) == 2_000 // (16 + 27)
    assert len(fit_window(titled, PLAIN, (), env)) == 2_000 // (16 + 227)
    small, large = Env(context_window=2_600, generation_reserve=RESERVE), Env()
    for env in (small, large):
        shown = show_text(hit("a", "x" * 200_000), PLAIN, (), env)
        assert shown.endswith("x (200000 characters)")
        assert UNCUT_CHARACTERS < len(shown) < 2 * env.prompt_limit
        assert show_text(hit("a", "x" * UNCUT_CHARACTERS), PLAIN, (), env) == "x" * UNCUT_CHARACTERS


def test_a_query_of_handles_is_no_longer_in_words_than_another() -> None:
    name = " ".join(["Ada" + "a" * 12] * 6)
    env = make_env(Env().switch(entity_handles=True), [chunk("a", f"the river of {name} is long")])
    steps = play(env, search("river"), search("E1 " * 600))
    assert 1_900 < len(steps[1].observation.rankings[0].query) <= 2_000


class Refusing(WordRetriever):
    async def grep(self, pattern: str, limit: int, deadline: float) -> BadPattern:
        return BadPattern("no " * 100_000)


def test_the_reason_of_an_engine_is_cut() -> None:
    env = make_env(retriever=Refusing([chunk("a", "river")]))
    (step,) = play(env, call("grep_corpus", pattern="x"))
    assert "no no no" in step.context.pieces[-2].text
    assert len(step.context.pieces[-2].text) < 1_400
