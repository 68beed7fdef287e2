import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness1.data.trec import read_qrels, read_run, write_run
from harness1.errors import CorpusError, UsageError
from harness1.records import UnitId

ID = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=6).filter(
    lambda name: name.split() == [name]
)
UNITS = st.lists(st.tuples(ID.map(UnitId), st.floats(allow_nan=False)), min_size=1, max_size=4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(ID, UNITS, max_size=4))
def test_a_run_comes_back_equal(tmp_path, run) -> None:
    write_run(tmp_path / "run", run.items(), "tag")
    assert read_run(tmp_path / "run") == list(run.items())


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(ID, st.dictionaries(ID.map(UnitId), st.integers(0, 3), min_size=1, max_size=3), max_size=4))
def test_documents_with_a_grade_are_relevant(tmp_path, qrels) -> None:
    lines = (f"{name} 0 {unit} {grade}\n" for name, grades in qrels.items() for unit, grade in grades.items())
    (tmp_path / "qrels").write_text("".join(lines), encoding="utf-8")
    positive = {name: {unit: grade for unit, grade in grades.items() if grade} for name, grades in qrels.items()}
    assert read_qrels(tmp_path / "qrels", qrels, "tasks") == {name: units for name, units in positive.items() if units}


def test_lines_are_those_of_trec_eval(tmp_path) -> None:
    write_run(tmp_path / "run", [("q1", [(UnitId("b#1"), 2.5), (UnitId("a"), 1.0)])], "harness1")
    assert (tmp_path / "run").read_text() == "q1 Q0 b#1 1 2.5 harness1\nq1 Q0 a 2 1.0 harness1\n"


def test_a_shuffled_run_is_sorted_by_its_ranks(tmp_path) -> None:
    (tmp_path / "run").write_text("q Q0 b 2 0.5 t\nr Q0 x 1 1 t\nq\tQ0\ta\t1\t0.7\tt\n\n")
    assert read_run(tmp_path / "run") == [("q", [("a", 0.7), ("b", 0.5)]), ("r", [("x", 1.0)])]


@pytest.mark.parametrize("name", ["my file.md", "", "tab\there", "line\n"])
def test_ids_with_white_space_are_refused(tmp_path, name: str) -> None:
    with pytest.raises(UsageError, match="white space"):
        write_run(tmp_path / "run", [("q", [(UnitId(name), 1.0)])], "tag")


def test_broken_lines_are_named(tmp_path) -> None:
    (tmp_path / "run").write_text("q Q0 a 1 0.5 t\nq Q0 a one 0.5 t\n")
    with pytest.raises(CorpusError, match="run:2: rank and score must be numbers"):
        read_run(tmp_path / "run")
    with pytest.raises(CorpusError, match="run:1: 6 columns where 4 are expected"):
        read_qrels(tmp_path / "run", "q", "tasks")
    (tmp_path / "run").write_text("q 0 a high\n")
    with pytest.raises(CorpusError, match="run:1: the grade must be a whole number"):
        read_qrels(tmp_path / "run", "q", "tasks")
    with pytest.raises(CorpusError, match="cannot read"):
        read_run(tmp_path / "absent")
