"""Snapshots of what the program says: which differences count, and that a run of them is complete."""

from benchmarks import snapshots


def test_differences_are_named_by_their_place():
    before = {"code": 0, "out": {"step_s": 1.0, "parts": [1, 2], "seconds": 3.0}, "error": "a"}
    after = {"code": 0, "out": {"step_s": 1.0 + 1e-13, "parts": [1, 3], "seconds": 4.0}, "error": "b", "more": 1}
    assert list(snapshots.differences(before, after)) == ["out / parts[1]: 2 -> 3", "error: a -> b", "more: None -> 1"]
    assert list(snapshots.differences(1.0, 1.0 + 1e-9, "x")) == ["x: 1.0 -> 1.000000001"]


def test_what_is_said_has_its_exit_code():
    wrong = snapshots.said(["predict", *snapshots.CALCULATED["predict a dense model"][1:], "++layout.tp=x"])
    assert wrong["code"] == 2
    assert "layout.tp" in wrong["error"]
    document = snapshots.said([*snapshots.CALCULATED["predict a dense model"], "--json"])
    assert document["out"]["step_time_s"] > 0


def test_a_second_run_finds_what_has_changed(monkeypatch, tmp_path, capsys):
    file, said = tmp_path / "before.json", {"a": 1}
    monkeypatch.setattr(snapshots, "PARTS", (said.items,))
    monkeypatch.setattr("sys.argv", ["snapshots", str(file)])
    assert (snapshots.main(), snapshots.main()) == (0, 0)
    said["a"] = 2
    assert snapshots.main() == 1
    assert "items: a: 1 -> 2\n1 differences" in capsys.readouterr().out
