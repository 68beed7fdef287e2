"""Documents of any size, in any number of parts: no search ends its episode, and no context is over its budget."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from harness1.config import Env, Evidence, Rendering
from harness1.records import Chunk
from tests.attack.attack import Attack
from tests.env.test_hostile_documents import ACTIONS, ORDERS, RESERVE, ByteCounter, corpora, lasts
from tests.support import make_env

FULL = 1_500


def test_no_document_ends_an_episode_in_any_window(attack: Attack) -> None:
    contexts = chunks_shown = 0

    def survives(drawn: tuple[list[Chunk], Any, list[Any], bool, int, bool]) -> None:
        nonlocal contexts, chunks_shown
        chunks, order, actions, handles, spare, bytewise = drawn
        counter = ByteCounter() if bytewise else None

        def sized(window: int) -> Env:
            rendering, evidence = Rendering(order=order), Evidence(handles=handles)
            return Env(context_window=window, generation_reserve=RESERVE, rendering=rendering, evidence=evidence)

        smallest = make_env(sized(200_000), counter=counter).renderer.smallest_window()
        room = (8_000 if bytewise else 800) * (len(actions) > 1)
        lasts(make_env(sized(smallest + room + spare), chunks, counter=counter), *actions)
        contexts += len(actions)
        chunks_shown += len(chunks)

    one = st.tuples(
        corpora(), st.sampled_from(ORDERS), st.just([ACTIONS[0]]), st.booleans(), st.just(0), st.just(False)
    )
    many = st.tuples(
        corpora(40_000),
        st.sampled_from(ORDERS[:3]),
        st.permutations(ACTIONS),
        st.booleans(),
        st.integers(0, 40_000),
        st.booleans(),
    )
    attack.try_all(st.one_of(one, many), survives, FULL)
    attack.report("hostile documents", episodes=attack.times(FULL), contexts=contexts, chunks=chunks_shown)
