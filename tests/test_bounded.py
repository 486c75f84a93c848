"""Reading files of others: only regular ones, of a bounded size, and only JSON that code can handle."""

import os
import socket

import pytest

from phalanx.bounded import field, parse_json, read_bytes, read_json, read_text


def test_a_regular_file_is_read_also_through_a_link(tmp_path):
    (tmp_path / "file").write_text('{"a": [1, 2.5, "é"]}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {"a": [1, 2.5, "é"]}
    assert read_text(tmp_path / "file").startswith("{")
    assert read_bytes(tmp_path / "file", 21)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    os.mkfifo("pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name, kind in (
            ("pipe", "a named pipe"),
            ("zero", "a character device"),
            ("socket", "a socket"),
            (".", "a directory"),
        ):
            with pytest.raises(OSError) as raised:
                read_bytes(tmp_path / name)
            assert raised.value.strerror == f"it is {kind}, not a regular file"


@pytest.mark.parametrize("name", ["none", "a" * 300, "a\0b", "\ud800"])
def test_names_that_no_file_has(tmp_path, name):
    with pytest.raises(OSError) as raised:
        read_bytes(tmp_path / name)
    assert raised.value.strerror


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(OSError) as raised:
        read_text(tmp_path / "sparse", 2**20)
    assert raised.value.strerror == "it is larger than 1.0MiB, the most that is read"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested deeper than 64 levels"),
        ("[" * 200 + "]" * 200, "nested deeper than 64 levels"),
        ('{"a":' * 65 + "0" + "}" * 65, "nested deeper than 64 levels"),
        ("9" * 5000, "a whole number of 5,000 digits"),
        (f"-{2**63}", "a whole number of 19 digits"),
        ('["\\ud800"]', "holds half a surrogate pair"),
        ('{"\\uDC00": 1}', "holds half a surrogate pair"),
        (b"\xff\xfe", "codec can't decode"),
    ],
)
def test_json_that_code_cannot_handle_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_that_is_accepted():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse_json(str(2**63 - 1)) == 2**63 - 1
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json('"\\ud83d\\ude00 \\\\ud800"') == "\U0001f600 \\ud800"
    assert parse_json('{"id": ' + "9" * 5000 + ', "text": "\\ud800"}', lenient=True)["text"] == "\ud800"


def test_fields_have_the_type_that_is_asked_for():
    entry = {"a": 1, "b": "x", "c": True, "d": 0.5}
    assert (field(entry, "a", int), field(entry, "b", str), field(entry, "a", float)) == (1, "x", 1.0)
    assert (field(entry, "c", bool), field(entry, "d", float)) == (True, 0.5)
    for name, kind, message in (
        ("c", int, "'c' is bool, expected int"),
        ("c", float, "'c' is bool, expected float"),
        ("b", int, "'b' is str, expected int"),
        ("none", str, "'none' is NoneType, expected str"),
    ):
        with pytest.raises(ValueError, match=message):
            field(entry, name, kind)
    with pytest.raises(ValueError, match="expected an object with 'a', found list"):
        field([1], "a", int)
