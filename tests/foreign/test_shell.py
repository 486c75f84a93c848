"""What follows from a shell script, without executing it."""

from __future__ import annotations

import pytest

from phalanx.foreign.shell import arithmetic, run_through


def words(text: str, command: int = -1) -> list[str]:
    return [word.text for word in run_through(text).commands[command]]


def test_variables_defaults_arrays_and_continued_lines():
    script = 'TP=8\nNAME=${NAME:-"a b"}\nARGS=(\n  --tp ${TP:-4} # no\n  --pp ${PP:-2}\n)\n'
    script += 'run "$NAME" \\\n  ${ARGS[@]} --n $((TP*2))\n'
    assert words(script) == ["run", "a b", "--tp", "8", "--pp", "2", "--n", "16"]


def test_a_word_says_which_line_gives_its_value():
    found = run_through("A=1\nTP=8\nrun --tp $TP --pp ${PP:-2}\n").commands[-1]
    assert [word.place for word in found[1:]] == [(3, "--tp"), (2, "8"), (3, "--pp"), (3, "2")]


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ('[[ "$D" == "fp8" ]]', "yes"),
        ('[ "$D" = bf16 ]', "no"),
        ('[ -n "$D" ] && [ -z "$UNSET" ]', "yes"),
        ('[[ "$D" == "x" ]] || [[ -z "$UNSET" ]]', "yes"),
        ("[ $((1+1)) -eq 2 ]", "yes"),
        ("[ ! -z $D ]", "yes"),
    ],
)
def test_conditions_of_known_texts(condition, value):
    assert words(f"D=fp8\nif {condition}; then\n  X=yes\nelse\n  X=no\nfi\nrun $X\n") == ["run", value]


def test_what_does_not_follow_is_unresolved():
    script = "A=$(nproc)\nB=`cat x`\nif [ -f file ]; then C=1; else C=2; fi\nfor i in 1 2; do D=$i; done\n"
    whys = {word.text: word.why for word in run_through(f"{script}run $A $B $C $D $1 $E\n").commands[-1][1:]}
    assert all(whys.values())
    assert "condition on line 3" in whys["$C"]
    assert "loop" in whys["$D"]
    assert "argument" in whys["$1"]
    assert whys["$E"] == "E is not set in the file"


def test_case_heredocs_and_appended_arrays():
    script = 'M=8B\ncase "$M" in\n "800M") W=1;;\n 8*) W=4;;\nesac\nA=(--x 1)\nA+=(--w $W)\n'
    script += "sbatch <<EOF\nsrun python a.py ${A[@]}\nEOF\n"
    assert words(script) == ["srun", "python", "a.py", "--x", "1", "--w", "4"]


def test_nothing_is_executed(tmp_path):
    target = tmp_path / "made"
    script = f'touch {target}\nA=$(touch {target})\nB=`touch {target}`\neval "touch {target}"\n'
    run_through(f"{script}run $A $B $(rm -rf {tmp_path})\n")
    assert [tmp_path.exists(), target.exists()] == [True, False]


UNCLOSED = ("'", '"', "${", "$((")
BROKEN = ("(", "if", "case", "case x in", "a=(", "<<", "<<EOF\n", "for", "f() {", "`", "\\")


@pytest.mark.parametrize("text", BROKEN)
def test_broken_scripts_are_read_to_their_end(text):
    run_through(text)
    run_through(f"A=1\n{text}\nrun $A")


@pytest.mark.parametrize("text", UNCLOSED)
def test_what_is_not_closed_is_refused_with_its_line(text):
    with pytest.raises(ValueError, match="line 2 has no closing"):
        run_through(f"A=1\n{text}--x\nrun $A")


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("cd a && run --x 1", "run --x 1"),
        ("for T in 1 2; do\nrun --x $T\ndone", "run --x $T"),
        ("f() {\nrun --x 1\n}\nf", "run --x 1"),
    ],
)
def test_commands_of_lists_loops_and_functions_count(text, command):
    assert command in [" ".join(word.text for word in each) for each in run_through(text).commands]


def test_commands_of_an_unknown_branch_are_doubtful():
    script = run_through("if grep -q x y; then\nrun --x 1\nelse\nrun --x 2\nfi")
    assert [words[2].text for words, why in script.doubtful if "condition on line 1" in why] == ["1", "2"]
    assert not any(words[0].text == "run" for words in script.commands)


def test_arithmetic():
    assert arithmetic("2 * (3 + 4) - 7 / 2") == 11
    for text in ("2 ** 9999", "__import__('os')", "1 / 0", "9" * 30 + "*" + "9" * 30, "a"):
        with pytest.raises(ValueError, match="."):
            arithmetic(text)


def test_a_script_that_grows_without_bound_is_refused():
    with pytest.raises(ValueError, match="more than|million"):
        run_through("A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 12)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("((T*=2))", "((…)) on line 2 changes it"),
        ("if (( T++ > 2 )); then echo; fi", "((…)) on line 2 changes it"),
        ("X=$((T++))", "$((…)) on line 2 changes it"),
        ("let T=2", "let on line 2 changes it"),
        ('eval "T=8"', "eval on line 2 sets it"),
        ("for ((T=1; T<4; T++)); do echo; done", "loop"),
        ("for a in 1; do ((T++)); done", "((…)) on line 2 changes it"),
        ("printf -v T %d 8", "printf on line 2 writes it"),
        ("mapfile -t T < file", "as the script runs"),
        ("while getopts t: T; do echo; done", "as the script runs"),
        ("declare -n R=T", "makes a reference"),
        ("declare -i T; T=T+1", "declared as a whole number"),
        ('[ -z "$X" ] && { T=2; }', "depends on the command before it"),
        ("T[0]=2", "one of its items"),
        ("f() { ((T=8)); }; T=4; f", "((…)) on line 2 changes it"),
        ("f() { T=8; }; T=4; if f; then echo; fi", "the function f, called on line 2, sets it"),
    ],
)
def test_what_changes_a_variable_out_of_sight_makes_it_unresolved(text, why):
    assert why in run_through(f"T=4\n{text}\nrun $T\n").commands[-1][1].why


def test_what_changes_no_variable_leaves_it():
    harmless = '( T=8 )\necho $((T*2))\nf() { echo; }\nf\neval "echo a=b"\n(( X = T == 4 ))\n[ $T == 4 ]\n'
    assert words(f"T=4\n{harmless}: ${{P:=2}}\nrun $T $P") == ["run", "4", "2"]


def test_what_stands_behind_the_end_of_a_script_is_doubtful():
    script = run_through("T=4\nif [ $# -lt 1 ]; then exit 1; fi\n(exit 0)\nrun --x 1\nexit 0\nT=8\nrun --x 2\n")
    assert [words[2].text for words, why in script.doubtful if why.startswith("exit on line 5")] == ["2"]
    assert [word.text for word in script.commands[-2]] == ["run", "--x", "1"]


@pytest.mark.parametrize(("end", "value"), [("<<'EOF'", "$T"), ("<<EOF", "\\$T")])
def test_a_script_in_a_here_document_has_variables_of_its_own(end, value):
    word = run_through(f"T=4\nsbatch {end}\nT=8\nrun {value}\nEOF\n").commands[-1][-1]
    assert "here document" in word.why
    assert words("T=4\nsbatch <<EOF\nrun $T\nEOF\n")[-1] == "4"


def test_what_eval_runs_is_known_or_said():
    script = run_through('A="run --x 1"\neval $A\neval "$(conda shell.bash hook)"\neval $UNSET\neval "$(cat env)"\n')
    assert [word.text for word in script.evaluated] == ["$(cat env)"]
    sourced = run_through("[ -f env.sh ] && source env.sh\nsource venv/bin/activate\n. /etc/profile\n").sourced
    assert [word.text for word in sourced] == ["env.sh"]


def test_arguments_of_a_function_are_not_those_of_the_script():
    run = run_through('f() { run --x 1 "$@"; }\nf --y 2\nrun $@\n')
    assert [(command[0].text, command[-1].why) for command in run.commands if command[0].text == "run"] == [
        ("run", "it is an argument of a function"),
        ("run", "it is an argument of the script"),
    ]
