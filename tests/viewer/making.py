"""Small run folders for tests of the viewer: a corpus of hostile texts, scripted actions, gold in a BEIR folder."""

import base64
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from harness1.config import Config
from harness1.data.open import open_source
from harness1.episodes.rollout import rollout
from harness1.episodes.single import open_run, question_task
from harness1.eval.cited import ASKED, Answer, Citation, Passage, Sentence
from harness1.policy.policy import Policy
from harness1.policy.wrappers import StudentFormatPolicy
from harness1.records import Chunk, ChunkId, DocId, Episode, Task, ToolCall
from harness1.reward import score
from harness1.runs.files import Stage
from harness1.runs.folder import public_config
from harness1.runs.journal import EpisodeStore, Journal
from harness1.viewer.tables import Parts
from harness1.viewer.tables import Passage as Shown
from tests.eval.run_folders import write_beir
from tests.support import CORPUS, END, Script, call, chunk, curate, make_env, run, search
from tests.vocabularies import chat_format, vocabulary

HOSTILE = "</script><img src=x onerror=alert(1)><!-- <script> ]]> &amp; <|im_start|>\u2028"
DOCUMENTS = (*CORPUS, chunk("evil", f"Lord Byron met {HOSTILE} in the town of Missolonghi.", f"Evil {HOSTILE}"))
QUESTION = "Where did the father of Ada Lovelace die?"
ACTIONS: tuple[ToolCall | Sequence[ToolCall] | str, ...] = (
    search("Ada Lovelace program daughter"),
    (call("fan_out_search", queries=["Lord Byron poet", "Missolonghi town"]), search("ignored")),
    curate(add_ids=["D1", "D2", "D3"], importance={"D1": "high", "D2": "low"}),
    call("verify", doc_ids=["D1", "D2"], claim="Ada Lovelace wrote the first program"),
    curate(add_ids=["D2"], remove_ids=["D3"], importance={"D2": "very_high"}),
    curate(add_ids=["D99"]),
    END,
)
GOLD = {"ada": 1, "miss": 1, "elsewhere": 1}


def script(*actions: ToolCall | Sequence[ToolCall] | str) -> Script:
    """A policy that takes some actions; by default those that show everything."""
    return Script(*(actions or ACTIONS))


def joined(parts: str | Parts, passages: Sequence[Shown]) -> str:
    """Put a text together as the page does."""
    if isinstance(parts, str):
        return parts
    text, rest = "", iter(parts)
    for part in rest:
        text += part if isinstance(part, str) else passages[part].body[slice(next(rest), next(rest))]
    return text


def write_dataset(folder: Path, tasks: Sequence[Task], documents: Sequence[Chunk] = DOCUMENTS) -> Path:
    """A BEIR folder in which every task has the same gold."""
    corpus = [{"_id": each.doc_id, "title": each.title, "text": each.text} for each in documents]
    return write_beir(folder, corpus, {task.task_id: task.query for task in tasks}, GOLD, "test")


def inflate(text: str) -> Any:
    """What a page makes of the content of a tag."""
    return json.loads(zlib.decompress(base64.b64decode(text), -zlib.MAX_WBITS))


def some_tasks(count: int) -> list[Task]:
    """Tasks with one question, and hostile text in the last one's."""
    return [Task(f"task-{at}", f"{QUESTION} ({at}) {HOSTILE if at == count - 1 else ''}") for at in range(count)]


def write_run(
    folder: Path,
    policies: Sequence[Policy],
    tasks: Sequence[Task],
    dataset: Path | None,
    config: Config | None = None,
    stage: Stage | None = None,
) -> list[Episode]:
    """A run folder in which each task was played by the policy of its place (the last one by all further tasks)."""
    config = config or Config()
    golds = {task.task_id: task.gold for task in open_source(str(dataset)).tasks("test")} if dataset else {}
    episodes = []
    for at, task in enumerate(tasks):
        policy = policies[min(at, len(policies) - 1)]
        counter = getattr(policy, "counter", None)
        env = make_env(config.env, DOCUMENTS, **({"counter": counter} if counter else {}))
        episode = run(rollout(env, policy, task))
        # A run has one policy, whatever plays its tasks here.
        episode = replace(episode, hashes=replace(episode.hashes, policy="script"))
        episodes.append(score(episode, golds[task.task_id], config) if task.task_id in golds else episode)
    write_episodes(folder, episodes)
    made_with = dict(zip(("env", "policy", "index"), episodes[0].key[2:], strict=True))
    names = {"dataset": dataset.name if dataset else "", "split": "test", "tasks": [task.task_id for task in tasks]}
    inputs = names | made_with
    outputs = {"policy": "script", "config": public_config(config), "index": "words", "source": str(dataset or "")}
    hashes = {} if stage is None else stage.hashes
    more = {} if stage is None else stage.outputs
    Stage("run", inputs, "finished", hashes=hashes, outputs=outputs | more).write(folder)
    metrics = {"curated_recall": {"mean": 0.5, "low": 0.4, "high": 0.6}, "failures": {}}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return episodes


def write_whole_run(home: Path, count: int) -> Path:
    """A finished run of some tasks, beside its dataset."""
    tasks = some_tasks(count)
    write_run(home / "whole", [script()], tasks, write_dataset(home / "data", tasks))
    return home / "whole"


def write_spoken_run(folder: Path, student: Path) -> None:
    """A run whose actions were said in tokens of a tokenizer that lies in `student`."""
    chat = chat_format("hermes", "qwen")
    student.mkdir()
    (student / "tokenizer.json").write_bytes(vocabulary("qwen"))
    stage = Stage("run", {}, hashes={"tokenizer": chat.tokenizer.hash}, outputs={"tokenizer": str(student)})
    write_run(folder, [StudentFormatPolicy(script(), chat)], some_tasks(1), None, stage=stage)


def write_episodes(folder: Path, episodes: Sequence[Episode]) -> None:
    with EpisodeStore(folder) as store:
        for episode in episodes:
            store.append(episode)


def write_training(folder: Path, steps: int = 30, better: float = 0.0) -> Path:
    """The log of a training with an evaluation at every tenth step."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "reward": 1 + better + step / steps, "loss": 1 / step})
        if step % 10 == 0:
            lines.append({"step": step, "held_out/reward": 1.1 + better + step / steps})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_answer(folder: Path, episode: Episode) -> Answer:
    """An answer from an episode: one sentence that holds, one that does not, and hostile text in all of it."""
    passage = Passage(ChunkId("evil"), DocId("evil"), f"Evil {HOSTILE}", f"Byron died there. {HOSTILE}")
    held = Sentence(f"He died. {HOSTILE}", (Citation(1, "Byron died there.", True), Citation(1, HOSTILE), Citation(9)))
    more = {"passages": (passage,), "episode_id": episode.episode_id}
    answer = Answer(question=QUESTION, model="m", text=HOSTILE, sentences=(held, Sentence("It rained.")), **more)
    with Journal(folder, ASKED) as journal:
        journal.write(msgspec.json.encode(answer))
    return answer


def write_searches(folder: Path, *queries: str) -> list[Episode]:
    """A run folder of questions that somebody asked, one after the other."""
    env = make_env(Config().env, DOCUMENTS)
    made_with = {"env": env.hash, "policy": "script", "index": env.retriever.info.index_hash}
    with open_run(folder, Config(), "script", "words", made_with) as keep:
        return [
            keep(run(rollout(make_env(Config().env, DOCUMENTS), script(), question_task(each)))) for each in queries
        ]
