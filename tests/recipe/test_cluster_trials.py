"""The commands of trials on a Ray cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness1.recipe.run import on_cluster


@pytest.mark.ray
def test_commands_run_on_the_nodes_and_leave_their_output(tmp_path: Path) -> None:
    import ray

    try:
        execute = on_cluster("local")
        assert execute(["index", "world:60", "--out", str(tmp_path / "index")], tmp_path / "logs" / "index.log", 1) == 0
        assert (tmp_path / "index" / "stage.json").is_file()
        assert execute(["index", str(tmp_path / "none"), "--out", str(tmp_path / "x")], tmp_path / "none.log", 1) == 2
        assert "no such file or folder" in (tmp_path / "none.log").read_text()
    finally:
        ray.shutdown()
