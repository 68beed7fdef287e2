import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness1.retrieval.files import Files, Keys, Strings, StringWriter, write_keys


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), unique=True, max_size=30), st.text(max_size=3))
def test_keys_are_read_and_found_again(tmp_path, values, other) -> None:
    write_keys(tmp_path, "keys", values)
    keys = Keys(Files(tmp_path), "keys")
    assert [keys[at] for at in range(len(keys))] == values
    assert keys.find(values) == list(range(len(values)))
    assert keys.find([other]) == [values.index(other) if other in values else -1]


def test_strings_with_equal_checksums_are_told_apart(tmp_path) -> None:
    assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
    write_keys(tmp_path, "keys", ["buckeroo", "plumless"])
    assert Keys(Files(tmp_path), "keys").find(["plumless", "buckeroo", "absent"]) == [1, 0, -1]
    write_keys(tmp_path, "one", ["buckeroo"])
    assert Keys(Files(tmp_path), "one").find(["plumless"]) == [-1]


def test_a_cut_file_is_noticed(tmp_path) -> None:
    with StringWriter(tmp_path, "list") as writer:
        writer.add(b"one")
        writer.add(b"two")
    (tmp_path / "list.bin").write_bytes(b"onet")
    with pytest.raises(ValueError, match="4 bytes instead of 6"):
        Strings(Files(tmp_path), "list")
