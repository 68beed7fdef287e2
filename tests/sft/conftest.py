"""A random model and a dataset for it, made once."""

from __future__ import annotations

import pytest

from tests.sft.test_fine_tuning import Place, save_rows, save_student


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """None of the tests changes it."""
    home = tmp_path_factory.mktemp("fine_tuning")
    return save_rows(home, save_student(home / "model"))
