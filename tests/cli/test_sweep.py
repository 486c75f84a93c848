"""`phalanx predict --sweep`: a prediction per combination of values, equal to that of the job by itself."""

import json
from itertools import product

import pytest

from phalanx.cli.main import main
from phalanx.cli.sweep import fields_of
from phalanx.errors import JobError

JOB = ["model=gpt2", "cluster=dgx-a100", "dp_replicate=-1", "precision=bf16", "global_batch=64"]


def predicted(*words, capsys):
    code = main(["predict", *JOB, *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_every_point_is_the_prediction_of_its_job(capsys):
    code, found = predicted("--sweep", "cluster.nodes=1,2", "recompute=none,full", capsys=capsys)
    assert code == 0
    values = [tuple(point["values"].values()) for point in found["points"]]
    assert values == [*product(("1", "2"), ("none", "full"))]
    for point in found["points"]:
        _, alone = predicted(*(f"{name}={value}" for name, value in point["values"].items()), capsys=capsys)
        for key in ("step_time_s", "memory", "mfu", "time_s", "fits"):
            assert point[key] == alone[key], key
        sent = sum(size for collectives in alone["traffic_bytes"].values() for size in collectives.values())
        assert point["sent_bytes"] == sent


def test_layouts_as_values_and_a_refused_one(tmp_path, capsys):
    picture = tmp_path / "sweep.svg"
    words = ["--sweep", "layout=dp_replicate=8;dp_shard=8,zero=3;tp=7;tp=4,dp_replicate=2", "--svg", str(picture)]
    assert main(["predict", *JOB, *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpt2 on 8 × a100-80gb (dgx-a100)"
    assert [line.split()[0] for line in lines[3:7]] == [
        "dp_replicate=8",
        "dp_shard=8,zero=3",
        "tp=7",
        "tp=4,dp_replicate=2",
    ]
    assert lines[5].split()[1:] == ["refused"]
    assert lines[8].startswith("refused: layout=tp=7: ")
    assert "n_heads 12 / tp 7" in lines[8]
    assert lines[-1] == f"written: {picture}"
    assert picture.read_text().count("class='measured'") == 2 * 3  # two panels, three legal layouts


@pytest.mark.parametrize(
    "given", [["layout=dp_shard=8,zero=3"], ["--layout", "dp_shard=8,zero=3"], ["dp_shard=8,zero=3"]]
)
def test_a_swept_layout_takes_the_place_of_the_jobs_in_any_form(given, capsys):
    words = ["predict", "model=gpt2", "cluster=dgx-a100", "precision=bf16", "global_batch=64", *given]
    assert main([*words, "micro_batch=1", "--sweep", "layout=tp=4,dp_replicate=2;dp_shard=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["points"]
    assert [point["layout"] for point in found] == ["dp_replicate=2,tp=4,micro_batch=1", "dp_shard=8,micro_batch=1"]


def test_a_job_may_be_legal_with_the_swept_values_alone(capsys):
    words = ["predict", "model=gpt2", "cluster=dgx-a100", "precision=bf16", "global_batch=64", "--sweep"]
    assert main([*words, "layout=tp=7;dp_replicate=8;dp_shard=8,zero=3"]) == 0
    assert capsys.readouterr().out.startswith("gpt2 on 8 × a100-80gb")
    assert main([*words, "tp=7,5"]) == 2
    error = capsys.readouterr().err
    assert "n_heads 12 / tp 7" in error
    assert "n_heads 12 / tp 5" in error
    assert main([*words[:-1], "steps=many", "--sweep", "tp=1,2"]) == 2
    assert "expected a whole number, found 'many'" in capsys.readouterr().err


def test_exit_codes(capsys):
    job = ["predict", "model=llama3-405b", "cluster=dgx-h100", "dp_replicate=8", "precision=bf16"]
    assert main([*job, "--sweep", "global_batch=8,16"]) == 3
    assert capsys.readouterr().out.count("does not fit") == 2
    assert main(["predict", *JOB, "--sweep", "tp=5,7"]) == 2
    said = capsys.readouterr().err
    assert "tp=5" in said
    assert "tp=7" in said
    assert "Traceback" not in said
    others = ["--tokens", "1T", "--svg", "x.svg", "--picture", "layout", "--largest", "80", "--table", "x.csv"]
    assert main(["predict", *JOB, "--sweep", "micro_batch=1,2", *others]) == 2
    assert "--sweep excludes --largest, --picture, --table, --tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["micro_batch"], "expected FIELD=A,B"),
        (["=1,2"], "expected FIELD=A,B"),
        (["tp=1,,2"], "expected FIELD=A,B"),
        (["tp=1,1"], "a value is given twice"),
        (["tp=1,2", "tp=4"], "tp is given twice"),
        (
            ["a=" + ",".join(map(str, range(40))), "b=" + ",".join(map(str, range(40)))],
            "1,600 combinations; at most 1,000",
        ),
    ],
)
def test_bad_words(texts, said):
    with pytest.raises(JobError, match=said):
        fields_of(texts)


@pytest.mark.parametrize(
    "words", [["predict", "--svg", "x.svg"], ["plan", "--svg", "x.svg"], ["predict", "--sweep", "tp=1,2"]]
)
def test_a_printed_job_writes_no_file_and_predicts_nothing(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main([*words, "model=tiny", "model.vocab_size=64", "cluster=dgx-h100", "dp_replicate=8", "--print-config"]) == 2
    )
    assert f"{words[1]} has no effect beside --print-config" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
