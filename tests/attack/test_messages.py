"""Messages of models, drawn at random: whole, quoted and damaged. None is misread, and none breaks the reader."""

from __future__ import annotations

from tests.attack.attack import Attack
from tests.models.writing import draw


def test_no_message_becomes_a_call_that_nobody_wrote(attack: Attack) -> None:
    counts = draw(attack.times(100_000), attack.seed)
    attack.report("messages", **{kind.replace(", ", " ").replace(" ", "_"): count for kind, count in counts.items()})
