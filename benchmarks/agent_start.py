"""The start of `agents.py`: a small random model that learned the form of the agent's answers, and nothing else.

Its teacher is careless: it answers with some words drawn at random, then with each number of a document with a
probability of one half.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from harness1.agents.evaluation import Evaluate, open_evaluation
from harness1.agents.rollouts import Agent, OnPolicyUpstream, agent_rollouts
from harness1.config import Config, Lora, Train
from harness1.data.open import open_source
from harness1.episodes.jobs import EpisodeJob
from harness1.errors import InfrastructureFault
from harness1.hashing import digest
from harness1.models.backend import Backend, Grammar, SampledOutput
from harness1.models.chat_format import ChatFormat
from harness1.models.open import format_at
from harness1.records import Episode, Hashes, Sampling, Task
from harness1.rl.rollouts import EpisodeGroup
from harness1.rl.training_rows import training_rows
from harness1.rows.row import TrainRow
from harness1.sft.new_model import Shape, draw
from harness1.training.algorithm import NegativeLogLikelihood
from harness1.training.saving import copy_beside_weights, save_whole
from harness1.training.trainable import load_trainable
from harness1.training.trainer import Trainer

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
AGENT, REWARD = EXAMPLES / "search_agent.py", f"{EXAMPLES / 'search_reward.py'}:f1"
SESSIONS = 120
SHAPE = Shape(words=1024, width=64, layers=2, heads=4)
WORDS, MOST_WORDS, HITS = 20, 3, 5
"""Words that the careless teacher knows, those that it says at most, and the hits that the agent shows."""
TAUGHT = Train(
    epochs=24, batch_rows=16, micro_tokens=4096, rate=3e-3, schedule="cosine", dtype="float32", lora=Lora(rank=0)
)


@dataclass(frozen=True)
class Place:
    """A folder, the tasks that are played from there, and the address of their index."""

    folder: Path
    data: str
    config: Config
    address: str

    @property
    def command(self) -> str:
        return shlex.join([sys.executable, str(AGENT), self.address])

    def tasks(self, split: str, limit: int | None = None) -> list[Task]:
        """Return the first tasks of a split."""
        return open_source(self.data).tasks(split)[:limit]


class Careless:
    """A backend that answers in the form that the agent reads, and by chance."""

    hash, version = "careless", 0

    def __init__(self, chat: ChatFormat, words: Sequence[str]) -> None:
        self._chat, self._words = chat, words

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, grammar: Grammar | None = None
    ) -> SampledOutput:
        """Draw an answer by the prompt."""
        random = Random(digest(list(prompt_ids)))
        if "[1]" in self._chat.tokenizer.decode(prompt_ids):
            said = [str(number) for number in range(1, HITS + 1) if random.random() < 0.5]
        else:
            said = random.choices(self._words, k=random.randint(0, MOST_WORDS))
        ids = (*self._chat.text(" ".join(said)), self._chat.stop_ids[0])
        return SampledOutput(ids, (0.0,) * len(ids), "stop")

    async def load_weights(self, folder: Path, version: int) -> None:
        raise NotImplementedError

    async def load_adapter(self, folder: Path, version: int) -> None:
        raise NotImplementedError


def make_start(place: Place) -> Path:
    """Draw a small model, teach it the form of the answers, and return its folder."""
    start, drawn = place.folder / "start", place.folder / "model"
    if (start / "config.json").is_file():
        return start
    documents = [f"{document.title}: {document.text}" for document in open_source(place.data).documents()]
    words = Random(0).sample(sorted({word.strip(".,;") for text in documents for word in text.split()}), WORDS)
    often = [AGENT.read_text(), " ".join(words), " ".join(map(str, range(1, HITS + 1)))] * 25
    tasks = place.tasks("train")
    draw(drawn, [*documents, *(task.query for task in tasks), *often], SHAPE, place.config, 0)
    chat = format_at(drawn, place.config)
    episodes = play(place, Careless(chat, words), chat, tasks[:SESSIONS], open_evaluation(REWARD), "taught")
    rows = training_rows([EpisodeGroup(0, 0, tuple(episodes))], place.config.rl)
    teach(drawn, [msgspec.structs.replace(row, rollout_logprobs=None, advantages=None) for row in rows], start)
    return start


def teach(drawn: Path, rows: Sequence[TrainRow], out: Path) -> None:
    """Train a model on the outputs of rows, and write it."""
    steps = TAUGHT.epochs * len(rows) // TAUGHT.batch_rows
    trainer = Trainer(load_trainable(drawn, TAUGHT, "cpu", 1), NegativeLogLikelihood(), TAUGHT, steps)
    random = Random(0)
    for step in range(steps):
        taken = trainer.step(random.sample(rows, min(len(rows), TAUGHT.batch_rows)))
        if step % 20 == 0:
            print(f"taught {step}/{steps} loss={taken['loss']:.3g}", file=sys.stderr, flush=True)
    copy_beside_weights(drawn, out)
    save_whole(out, trainer.model, trainer.weights())  # type: ignore[arg-type]


def play(
    place: Place, model: Backend, chat: ChatFormat, tasks: Sequence[Task], evaluate: Evaluate, name: str
) -> list[Episode]:
    """Play a session of the agent with each task as `rl agents` does.

    Raises:
        InfrastructureFault: one of them is broken.
    """
    golds = {task.task_id: task.gold for task in tasks}
    agent = Agent(place.command, evaluate, golds, Hashes("", model.hash, ""), os.environ)
    upstream = OnPolicyUpstream(name, model, chat, place.config)
    episodes: list[Episode] = []

    async def published(*_: object) -> None:
        raise NotImplementedError

    async def played() -> None:
        async with agent_rollouts(agent, upstream, place.folder / f"sessions-{name}", place.config, published) as each:
            await each.run([EpisodeJob(task.public(), 0) for task in tasks], episodes.append)

    asyncio.run(played())
    if broken := [episode.error for episode in episodes if episode.reward is None]:
        raise InfrastructureFault(f"{len(broken)} sessions are broken: {broken[0]}")
    return episodes
