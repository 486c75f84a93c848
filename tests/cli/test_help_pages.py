"""The help pages of all verbs: short, in the width of the terminal, and made from what the verbs parse."""

import shlex

import pytest

from phalanx.cli import launch
from phalanx.cli.help_page import clipped, command_lines
from phalanx.cli.main import VERBS, description_of, main

WIDTHS = (60, 80, 140)
MOST_LINES = 45


def page(capsys, monkeypatch, width: int, *argv: str) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_is_short_and_fits_the_terminal(verb, capsys, monkeypatch):
    described = description_of(verb).page
    for width in WIDTHS:
        found = page(capsys, monkeypatch, width, verb, "--help")
        lines = found.splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) <= MOST_LINES
        assert lines[0].startswith(f"usage: phalanx {verb}")
        text = " ".join(found.split())
        assert described.about in text
        assert text.count(" phalanx ", text.index("examples:"), text.index(" options: ")) >= 2
        assert not [option.name for option in described.options if f"--{option.name.replace('_', '-')}" not in found]


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_in_full_fits_the_terminal(verb, capsys, monkeypatch):
    for width in (60, 80):
        found = page(capsys, monkeypatch, width, verb, *(["prepare"] if verb == "data" else []), "--help", "all")
        assert max(map(len, found.splitlines())) <= width
        text = " ".join(found.split())
        assert not [option.name for option in description_of(verb).page.options if option.text not in text]


def test_the_list_of_verbs_is_short_and_fits_the_terminal(capsys, monkeypatch):
    for width in WIDTHS:
        lines = page(capsys, monkeypatch, width).splitlines()
        assert max(map(len, lines)) <= width
        assert {line.split()[0] for line in lines if line.startswith("  ")} >= {*VERBS}
    assert page(capsys, monkeypatch, 80, "help", "plan") == page(capsys, monkeypatch, 80, "plan", "--help")


@pytest.mark.parametrize("verb", VERBS)
def test_the_two_examples_parse(verb):
    described = description_of(verb)
    assert len(described.examples) == 2
    assert any(words.split()[0] == verb for words, _ in described.examples)
    for words, what in described.examples:
        assert what
        name, *rest = shlex.split(words.partition(" > ")[0])
        called = description_of(name)
        if name == "launch":
            rest, _ = launch.own_names(rest)
        if called.takes_job:
            assert called.command_line(rest[len(called.name.split()) - 1 :])[1].problems == []
        else:
            assert called.read(rest)[1] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_what_it_does(verb):
    for option in description_of(verb).page.options:
        assert len(option.about.split()) >= 2, option.name


def test_help_explains_one_command_or_one_option(capsys, monkeypatch):
    found = page(capsys, monkeypatch, 80, "checkpoint", "convert", "--help")
    assert found.startswith("usage: phalanx checkpoint convert SOURCE TARGET [options]\n")
    assert "--merge-lora" in found
    assert "--boxes" not in found
    assert found == page(capsys, monkeypatch, 80, "checkpoint", "--help", "convert")
    assert page(capsys, monkeypatch, 80, "generate", "--help", "top-k").split()[:2] == ["--top-k", "N"]
    assert page(capsys, monkeypatch, 80, "watch", "--help", ".").startswith("usage: phalanx watch RUN")
    assert main(["watch", "--help", "onse"]) == 2
    assert "--help onse: no option of this name; did you mean once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["watch", "a", "b"], "phalanx watch takes RUN, found a b"),
        (["generate", "--temperature", "0"], "phalanx generate takes RUN, found nothing"),
        (["evaluate", "--batch-size", "x"], "--batch-size: expected a whole number, found 'x'"),
        (["checkpoint", "lst"], "phalanx checkpoint has no command 'lst'; did you mean `phalanx checkpoint list`?"),
        (["init", "a.yaml", "b.yaml"], "phalanx init takes [FILE], found a.yaml b.yaml"),
        (["serve", "runs/main", "--host"], "--host: needs a value"),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_message(argv, message, capsys):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_an_option_that_may_be_repeated_has_all_its_values():
    words, problems = description_of("generate").read(["run", "--stop", "a", "--stop=b"])
    assert (words.options["stop"], words.stated, problems) == (("a", "b"), {"stop"}, [])


def test_a_long_command_is_broken_as_a_shell_reads_it():
    lines = command_lines("phalanx plan model=llama3-8b cluster=dgx-h100:1", 30, 2)
    assert lines == ["  phalanx plan \\", "      model=llama3-8b \\", "      cluster=dgx-h100:1"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("All of it.", "All of it."),
        ("The first sentence. And a second one.", "The first sentence"),
        ("One: a clause that says little is no text", "One: a clause that says …"),
    ],
)
def test_a_text_is_clipped_at_a_sentence_or_a_word(text, shown):
    assert clipped(text, 26) == shown
