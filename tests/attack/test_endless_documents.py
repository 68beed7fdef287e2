"""Documents of any size, in any number of parts: no search ends its episode, and no context is over its budget."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.attack.attack import Attack
from tests.env.test_hostile_documents import ACTIONS, ORDERS, ByteCounter, corpora, lasts, sized
from tests.support import make_env


def test_no_document_ends_an_episode_in_any_window(attack: Attack) -> None:
    def survives(drawn: Any) -> None:
        chunks, order, actions, handles, spare, counter = drawn
        smallest = make_env(sized(200_000, order, handles), counter=counter).renderer.smallest_window()
        room = (8_000 if counter else 800) * (len(actions) > 1)
        lasts(make_env(sized(smallest + room + spare, order, handles), chunks, counter=counter), *actions)

    handles, orders = st.booleans(), st.sampled_from(ORDERS)
    one = st.tuples(corpora(), orders, st.just(ACTIONS[:1]), handles, st.just(0), st.none())
    counters, spare = st.sampled_from([None, ByteCounter()]), st.integers(0, 40_000)
    many = st.tuples(corpora(40_000), st.sampled_from(ORDERS[:3]), st.permutations(ACTIONS), handles, spare, counters)
    attack.try_all(st.one_of(one, many), survives, 1_500)
    attack.report("hostile documents", episodes=attack.times(1_500))
