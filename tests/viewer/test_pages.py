import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness1.errors import UsageError
from harness1.eval.compare import compare
from harness1.eval.run import read_run
from harness1.records import Episode
from harness1.runs.journal import read_episodes
from harness1.viewer.pages import Written, write_view
from harness1.viewer.run_page import EpisodeRow, in_order, with_room
from harness1.viewer.tables import BLOCK
from tests.support import END, Script, chunk, curate, search
from tests.viewer import making

Page = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of four tasks: one that shows everything, one that fails its format, and two that end at once."""
    tasks = making.some_tasks(4)
    dataset = making.write_dataset(tmp_path / "data", tasks)
    making.write_run(tmp_path / "run", [making.script(), Script(search("Ada"), "no call"), Script(END)], tasks, dataset)
    return tmp_path / "run"


def opened(path: Path) -> Page:
    """What a page finds in the file: its index, and the data of its tags."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="index">(.*?)</script>', text, re.S)
    index = json.loads(found.group(1))
    index["rows"] = [dict(zip(index["columns"], row, strict=True)) for row in index["rows"]]
    tags = re.findall(r'<script type="text/plain" id="(\w+)">([A-Za-z0-9+/=,]*)</script>', text)
    parts = {name: [making.inflate(part) for part in body.split(",")] for name, body in tags}
    blocks = [each for name, (each, *_) in parts.items() if name.startswith("p")]
    passages = {name: [blocks[at // BLOCK][at % BLOCK] for at in rest[0]] for name, (_, *rest) in parts.items() if rest}
    return index | {"tags": {name: data for name, (data, *_) in parts.items()}, "passages": passages, "text": text}


def written(folder: Path, **options: Any) -> tuple[Written, Page]:
    out = folder.parent / "view.html"
    done = write_view([folder], out, workers=1, **options)
    return done, opened(out)


def test_a_file_holds_every_episode_and_its_row(folder: Path) -> None:
    done, page = written(folder)
    assert (done.episodes, done.left_out, done.problems) == (4, 0, 0)
    assert done.size == (folder.parent / "view.html").stat().st_size
    rows = page["rows"]
    assert [row["failure"] for row in rows] == ["search", "format", "empty", "empty"]
    assert (rows[0]["recall"], rows[0]["trajectory"], rows[0]["turns"]) == (round(2 / 3, 4), round(2 / 3, 4), 7)
    assert page["tags"]["e0"]["query"].startswith("Where did the father")
    assert {"r0", "p0", "e0", "e1", "e2", "e3"} == set(page["tags"])
    tools = page["runs"][0]["tools"]
    assert {name for bit, name in enumerate(tools) if rows[1]["tools"] >> bit & 1} == {"search_corpus"}
    assert rows[0]["tokens"] == sum(turn["tokens"] for turn in page["tags"]["e0"]["turns"])


def test_no_page_of_others_comes_into_a_run(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    for folders in ([other], [folder, other]):
        with pytest.raises(UsageError, match="lies in a run"):
            write_view(folders, folder / "view.html", workers=1)
    assert write_view([folder], folder / "view.html", workers=1).episodes == 4


def test_texts_and_names_of_folders_are_only_text(folder: Path, tmp_path: Path) -> None:
    _, page = written(folder)
    text = page["text"]
    assert any(making.HOSTILE in passage[3] for passage in page["passages"]["e0"])
    assert "<img" not in text
    assert text.count("<!--") == 0
    assert text.count("<script") == text.count("</script>") == 2 + len(page["tags"])
    assert "Content-Security-Policy\" content=\"default-src 'none'" in text
    making.write_run(tmp_path / "<b>run&", [Script(END)], making.some_tasks(1), None)
    _, page = written(tmp_path / "<b>run&")
    assert "<title>&lt;b&gt;run&amp;</title>" in page["text"]
    assert (page["runs"][0]["name"], "<b>" in page["text"]) == ("<b>run&", False)


def test_an_answer_lies_beside_its_search_and_is_only_text(tmp_path: Path) -> None:
    first, _ = making.write_searches(tmp_path / "asked", making.QUESTION, "Who was the poet?")
    answer = making.write_answer(tmp_path / "asked", first)
    _, page = written(tmp_path / "asked")
    assert page["tags"]["e0"]["answers"] == [json.loads(json.dumps(answer.as_json()))]
    assert page["tags"]["e1"]["answers"] == []
    assert "<img" not in page["text"]


def test_what_has_no_room_or_was_not_asked_for_is_left_out_and_keeps_its_row(folder: Path) -> None:
    whole, _ = written(folder)
    done, page = written(folder, max_bytes=whole.size - 1)
    assert done.size <= whole.size - 1
    assert done.left_out == 1
    assert [row["held"] for row in page["rows"]].count(False) == 1
    assert len(page["rows"]) == 4
    none, bare = written(folder, max_bytes=1)
    assert none.left_out == 4
    assert set(bare["tags"]) == {"r0"}
    done, page = written(folder, tasks=["task-1"])
    assert [row["held"] for row in page["rows"]] == [False, True, False, False]
    assert done.left_out == 3
    _, page = written(folder, episodes=[page["rows"][3]["episode"]])
    assert [row["held"] for row in page["rows"]] == [False, False, False, True]
    with pytest.raises(UsageError, match="'nobody'"):
        written(folder, tasks=["nobody"])


def test_the_worst_and_the_best_tasks_come_first_with_all_their_episodes() -> None:
    recalls = {"a": (0.5, 0.5), "b": (0.0, 0.2), "c": (1.0, 1.0), "d": (None, 0.6)}
    rows = [
        EpisodeRow(run, f"{task}{run}", task, 0, "", "", "", "", values[run], None, None, 0, 0, 0, None, 0, 0)
        for run in (0, 1)
        for task, values in recalls.items()
    ]
    order = [rows[place].episode for place in in_order(rows)]
    assert order == ["b0", "b1", "c0", "c1", "d0", "d1", "a0", "a1"]
    assert in_order([msgspec.structs.replace(row, recall=None) for row in rows[:3]]) == [2, 1, 0], "the latest first"


def test_what_fits_is_taken_in_order_and_passages_count_once() -> None:
    sizes: list[tuple[int, list[int]]] = [(5, []), (3, []), (9, [])]
    assert with_room([2, 0, 1], sizes, [10] * 6, 12) == {1, 2}
    sizes = [(1, [1, 2]), (1, [2, 3]), (1, [4, 5])]
    assert with_room([0, 1, 2], sizes, [10] * 6, 35) == {0, 1}


def test_an_episode_that_was_run_again_counts_as_the_last_time(folder: Path) -> None:
    _, page = written(folder)
    again = page["rows"][0]["episode"]
    first: Episode = next(read_episodes(folder))
    making.write_episodes(folder, [msgspec.structs.replace(first, stage_ms={"policy": 77.0})])
    _, page = written(folder)
    assert [row["episode"] for row in page["rows"]].count(again) == 1
    assert page["tags"]["e0"]["stage_ms"] == {"policy": 77.0}


def test_without_its_dataset_a_run_has_no_gold_and_says_so(folder: Path) -> None:
    (folder.parent / "data").rename(folder.parent / "moved")
    _, page = written(folder)
    assert "cannot be opened" in page["runs"][0]["notes"][0]
    assert {row["failure"] for row in page["rows"]} == {"unscored", "format"}
    assert page["tags"]["e0"]["gold"] is None


def test_gold_that_no_search_found_has_its_title(tmp_path: Path) -> None:
    tasks = making.some_tasks(1)
    unseen = chunk("elsewhere", "Nobody searches for this.", "A far place")
    dataset = making.write_dataset(tmp_path / "data", tasks, (*making.DOCUMENTS, unseen))
    making.write_run(tmp_path / "run", [Script(END)], tasks, dataset)
    _, page = written(tmp_path / "run")
    titles = {row[1]: row[2] for row in page["tags"]["e0"]["units"]}
    assert titles["elsewhere"] == "A far place"
    assert titles["ada"] == "Ada Lovelace"


def test_what_cannot_be_replayed_is_listed_with_the_reason(folder: Path) -> None:
    stage = json.loads((folder / "stage.json").read_text())
    stage["outputs"]["config"]["env"]["max_turns"] = 5
    (folder / "stage.json").write_text(json.dumps(stage))
    done, page = written(folder)
    assert done.problems == 4
    assert "another environment" in page["rows"][0]["problem"]
    assert page["tags"]["e0"]["turns"][0]["context"] is None


def test_worker_processes_write_the_same_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, alone = written(folder)
    monkeypatch.setattr("harness1.viewer.pages.WORTH_A_POOL", 0)
    write_view([folder], folder.parent / "view.html", workers=2)
    assert opened(folder.parent / "view.html")["text"] == alone["text"]


def test_a_training_becomes_curves_with_its_evaluations_apart(tmp_path: Path) -> None:
    _, page = written(making.write_training(tmp_path / "train"))
    curves = page["tags"]["t0"]
    assert curves["curves"]["reward"][0] == list(range(1, 31))
    assert curves["validation"] == {"reward": [[10, 20, 30], [1.1 + 1 / 3, 1.1 + 2 / 3, 2.1]]}
    assert ([each["name"] for each in page["trainings"]], page["rows"]) == (["train"], [])
    with pytest.raises(UsageError, match="cannot be written"):
        write_view([tmp_path / "train"], tmp_path / "absent" / "view.html")
    with pytest.raises(UsageError, match="not a run folder"):
        written(tmp_path)


def test_a_run_whose_tokenizer_is_here_has_its_prompts_as_text(tmp_path: Path) -> None:
    making.write_spoken_run(tmp_path / "run", tmp_path / "student")
    done, page = written(tmp_path / "run")
    assert done.problems == 0
    call = page["tags"]["e0"]["turns"][0]["calls"][0]
    keys = [page["tags"]["e0"]["sent"][number][0] for number in call["prompt"]]
    assert "<|im_start|>" in page["tags"]["r0"]["texts"][keys[0]]
    assert "search_corpus" in call["output"]
    (tmp_path / "student" / "tokenizer.json").unlink()
    _, page = written(tmp_path / "run")
    assert "tokenizer" in page["runs"][0]["notes"][-1]
    assert page["tags"]["e0"]["turns"][0]["calls"][0]["output"] is None


def test_pairs_have_the_statistics_of_compare(tmp_path: Path) -> None:
    tasks = making.some_tasks(4)
    dataset = making.write_dataset(tmp_path / "data", tasks)
    least = Script(search("Missolonghi town"), curate(add_ids=["D1"], importance={"D1": "high"}), END)
    for name, policies in {"a": [making.script(), Script(END)], "b": [least], "c": [Script(END), least]}.items():
        making.write_run(tmp_path / name, policies, tasks, dataset)
    making.write_run(tmp_path / "other", [least], tasks, making.write_dataset(tmp_path / "others", tasks))
    out = tmp_path / "view.html"
    write_view([tmp_path / name for name in "abc"], out, workers=1)
    page = opened(out)
    assert [(pair["first"], pair["second"]) for pair in page["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    wanted = compare([read_run(tmp_path / name) for name in "abc"])
    for pair, other in zip(page["pairs"], wanted.others, strict=False):
        assert pair["tasks"] == other.tasks
        assert pair["metrics"].keys() == other.metrics.keys()
        for name, found in pair["metrics"].items():
            row = other.metrics[name]
            between = row.difference
            expected = (row.first, row.second, between.mean, between.low, between.high, row.p_holm)
            assert found == pytest.approx(expected)
    rows = {(row["run"], row["task"]): row["delivered"] for row in page["rows"]}
    assert rows[0, "task-1"] == rows[2, "task-0"] != rows[0, "task-0"]  # checksums of equal and other sets
    write_view([tmp_path / "a", tmp_path / "other"], out, workers=1)
    assert opened(out)["pairs"] == []  # its tasks are others
