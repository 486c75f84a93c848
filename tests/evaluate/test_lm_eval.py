"""lm-eval's adapter: its requests against a plain reference in float64, and a task with a stand-in for the harness."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from generate.written import write_run
from model.kinds import KINDS
from phalanx.cli.main import main
from phalanx.config.corpora import BUILT_IN
from phalanx.data.template import ChatPrompts, ChatTemplate
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.evaluate import harness
from phalanx.evaluate.harness import MOST_NEW_TOKENS, Prompt, RequestScorer
from phalanx.generate.decoder import Decoder
from phalanx.generate.load import load_run

LLAMA = dataclasses.replace(KINDS["llama"], vocab_size=256)
"""A model of bytes with a context of 12."""
NEWLINE = ord("\n")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    write_run(path, LLAMA)
    ByteTokenizer().save(path)
    return path


def scorer_of(run, batch_size: int) -> RequestScorer:
    loaded = load_run(run, device="cpu")
    assert isinstance(loaded.decoder, Decoder)
    return RequestScorer(loaded.decoder, loaded.tokenizer, batch_size)


def logs(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0, -1].log_softmax(-1)


def test_likelihoods_are_those_of_a_plain_reference(run):
    """Short, with spaces between, without a context, with one that is too long, and longer than the model's context."""
    scorer = scorer_of(run, 2)
    pairs = [("ab", "cd"), ("ab ", "cd"), ("", "xyz"), ("a" * 30, "bc"), ("ab", "x" * 20), ("a", "b")]
    found = scorer.likelihoods(pairs)
    for (before, after), each in zip(pairs, found, strict=True):
        stripped = before.rstrip()
        tokens = list((before + after).encode()) if stripped else [NEWLINE, *(before + after).encode()]
        own = len(stripped) or 1
        value, greedy, end = 0.0, True, len(tokens)
        for place in range(own, len(tokens)):
            # Windows of 12 predictions, counted from the end.
            start = max(0, end - 13 - (end - 1 - place) // 12 * 12)
            chosen = logs(scorer.decoder.model, tokens[start:place])
            value += chosen[tokens[place]].item()
            greedy &= int(chosen.argmax()) == tokens[place]
        assert each.value == pytest.approx(value, rel=1e-9)
        assert each.greedy == greedy


def test_a_rolling_likelihood_covers_the_text_once(run):
    scorer = scorer_of(run, 3)
    texts = ["the quick brown fox jumps", "a", ""]
    for text, found in zip(texts, scorer.rolling(texts), strict=True):
        tokens = [NEWLINE, *text.encode()]
        value = sum(
            logs(scorer.decoder.model, tokens[(place - 1) // 12 * 12 : place])[tokens[place]].item()
            for place in range(1, len(tokens))
        )
        assert found == pytest.approx(value, rel=1e-9)


def test_a_greedy_answer_is_the_likeliest_one_and_ends_before_the_first_stop(run):
    scorer = scorer_of(run, 2)
    [whole] = scorer.continuations([Prompt("ab", [], 10)])
    assert "ab" + whole == load_run(run, device="cpu").text("ab", max_new_tokens=10, temperature=0)
    stop = whole[3:5]
    cut, other, short = scorer.continuations(
        [Prompt("ab", ["no such", stop], 10), Prompt("xyz", [], 10), Prompt("", [], 4)]
    )
    assert cut == whole[: whole.index(stop)]
    assert "xyz" + other == load_run(run, device="cpu").text("xyz", max_new_tokens=10, temperature=0)
    assert len(short) <= 4


def test_chat_contexts_are_the_templates_and_answers_end_where_its_own_do(run):
    plain = scorer_of(run, 2)
    source = BUILT_IN["chatml"].jinja
    chat = ChatPrompts(ChatTemplate(source, {}, "a test", trusted=True), plain.tokenizer)
    scorer = dataclasses.replace(plain, chat=chat)
    text = chat.text([{"role": "user", "content": "ab"}])
    assert text.endswith("<|im_start|>assistant\n")
    assert scorer.likelihoods([(text, "cd")]) == plain.likelihoods([(text, "cd")])
    [whole] = plain.continuations([Prompt(text, [], 8)])
    chat._end = whole[3:5]
    assert scorer.continuations([Prompt(text, ["no such"], 8)]) == [whole[: whole.index(whole[3:5])]]


class StandIn:
    """lm_eval as far as the adapter uses it: one task with one request of each kind."""

    def __init__(self, **options) -> None:
        self.all_tasks = ["mine"]

    @staticmethod
    def simple_evaluate(model, tasks, limit, **options):
        def request(*args):
            return [SimpleNamespace(args=args)]

        [(value, greedy)] = model.loglikelihood(request("ab", "cd"))
        [rolling] = model.loglikelihood_rolling(request("abc"))
        if options["apply_chat_template"]:
            assert model.chat_template(True) == BUILT_IN["chatml"].jinja
            before = model.apply_chat_template([{"role": "user", "content": "ab"}])
            assert before == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
        [text] = model.generate_until(request("ab", {"until": "\n", "max_gen_toks": 3, "do_sample": False}))
        assert isinstance(greedy, bool)
        return {"results": {tasks[0]: {"alias": "x", "ll": value, "rolling": rolling, "length": len(text), "n": "N/A"}}}


@pytest.fixture
def stand_in(monkeypatch):
    for name, content in {
        "lm_eval": {"simple_evaluate": StandIn.simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": type("LM", (), {"__init__": lambda self: None})},
        "lm_eval.tasks": {"TaskManager": StandIn},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(harness, "find_spec", lambda name: object())
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_a_task_runs_through_the_verb(run, stand_in, capsys):
    assert main(["evaluate", str(run), "--tasks", "mine", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["runs"].values()
    assert found["mine"].keys() == {"ll", "rolling", "length"}
    expected = scorer_of(run, 8)
    assert found["mine"]["ll"] == pytest.approx(expected.likelihoods([("ab", "cd")])[0].value, rel=1e-9)
    assert found["mine"]["rolling"] == pytest.approx(expected.rolling(["abc"])[0], rel=1e-9)
    assert main(["evaluate", str(run), "--tasks", "mine"]) == 0
    assert f"{run}  mine  ll: {found['mine']['ll']:.4f}" in capsys.readouterr().out


def test_tasks_are_asked_by_the_runs_chat_template(run, stand_in, capsys, tmp_path):
    argv = ["evaluate", str(tmp_path / "chat"), "--tasks", "mine", "--chat", "--json"]
    shutil.copytree(run, tmp_path / "chat")
    assert main(argv) == 2
    assert "has no chat template: train on data.corpus=chat" in capsys.readouterr().err
    (tmp_path / "chat/chat_template.jinja").write_text(BUILT_IN["chatml"].jinja)
    assert main(argv) == 0
    assert main(["evaluate", str(run), "--chat"]) == 2
    assert "--chat is for tasks of lm-eval: name some with --tasks" in capsys.readouterr().err


def test_mistakes_about_tasks_are_told(run, stand_in, capsys, monkeypatch):
    assert main(["evaluate", str(run), "--tasks", "yours, minne,mine"]) == 2
    refusal = capsys.readouterr().err
    assert "lm-eval has no task yours (your own: --include-path FOLDER" in refusal
    assert "lm-eval has no task minne; did you mean mine?" in refusal
    assert main(["evaluate", str(run), "--tasks", "mine", "--layout", "tp=2"]) == 2
    assert "--layout: tasks of lm-eval bring their own texts, and run on one process" in capsys.readouterr().err
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    assert main(["evaluate", str(run), "--tasks", "mine"]) == 2
    assert 'needs lm-eval, not installed here: pip install "phalanx[lm-eval]"' in capsys.readouterr().err


TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: {kind}
doc_to_text: "{before}"
doc_to_target: "{{{{after}}}}"
metric_list: [{{metric: {metric}}}]
{more}
"""


def test_the_harness_itself_runs_tasks_of_each_kind(run, tmp_path, monkeypatch, capsys):
    """Where lm-eval is installed, without a network."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    likely, answer = (scorer_of(run, 8).continuations([Prompt("ab", ["\n"], most)])[0] for most in (1, MOST_NEW_TOKENS))
    rows = [{"before": "ab", "after": answer, "choices": [likely, "zz" + likely]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {
        "choice": ("multiple_choice", "{{before}}", "acc", "doc_to_choice: choices"),
        "text": ("loglikelihood_rolling", "", "byte_perplexity", ""),
        "answer": (
            "generate_until",
            "{{before}}",
            "exact_match",
            'generation_kwargs: {until: ["\\n"]}',
        ),
    }
    for name, (kind, before, metric, more) in kinds.items():
        task = TASK.format(name=name, folder=tmp_path, kind=kind, before=before, metric=metric, more=more)
        task = task.replace('"{{after}}"', "0") if name == "choice" else task
        (tmp_path / f"{name}.yaml").write_text(task)
    argv = ["evaluate", str(run), "--tasks", "choice, text,answer", "--include-path", str(tmp_path), "--json"]
    assert main(argv) == 0
    [found] = json.loads(capsys.readouterr().out)["runs"].values()
    assert (found["choice"]["acc,none"], found["answer"]["exact_match,none"]) == (1.0, 1.0)
    [value] = scorer_of(run, 8).rolling([answer])
    assert found["text"]["byte_perplexity,none"] == pytest.approx(math.exp(-value / len(answer.encode())))
