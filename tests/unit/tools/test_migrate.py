"""Recipes of upstream's are read as bash reads them, judged flag by flag, and rewritten without losing one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.errors import ConfigError
from mindspeed_llm.tools.migrate.__main__ import main
from mindspeed_llm.tools.migrate.evaluate import evaluate, python_commands
from mindspeed_llm.tools.migrate.judge import judge, together
from mindspeed_llm.tools.migrate.ours import counterpart
from mindspeed_llm.tools.migrate.rewrite import rewrite

UPSTREAM = sorted((Path(__file__).resolve().parents[2] / "examples" / "upstream").glob("*.sh"))
ARGUMENTS = ("one", "two words", "three")
STAND_IN = f"""#!{sys.executable} -I
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def launchers(tmp_path: Path) -> Path:
    """A folder with stand-ins for launchers, which write their arguments down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torchrun", "python", "tee"):
        (folder / name).write_text(STAND_IN if name != "tee" else "#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def by_bash(text: str, launchers: Path) -> list[list[str]]:
    """What bash starts."""
    calls = launchers.parent / "calls"
    calls.unlink(missing_ok=True)
    calls.touch()
    subprocess.run(
        ["/bin/bash", "-c", text, "recipe", *ARGUMENTS],
        cwd=launchers.parent,
        env={"PATH": str(launchers), "CALLS": str(calls), "GIVEN": "by the environment"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        check=False,
    )
    return [json.loads(line) for line in calls.read_text().splitlines()]


def by_us(text: str) -> list[list[str]]:
    """What we find that it starts; words that are not known are left out, as an unset variable is by bash."""
    commands = python_commands(evaluate(text, ARGUMENTS, {"GIVEN": "by the environment"}))
    return [[word.text for word in command.words[1:] if word.text or not word.missing] for command, _ in commands]


CONSTRUCTS = {
    "strings": 'A="--x 1 \\\n  --y 2"\ntorchrun r.py $A "$A" --z',
    "references in strings": 'TP=4\nA="--tp ${TP} --w $((TP * 2)) --v $(($TP/2))"\ntorchrun r.py $A',
    "arrays": 'A=(--x 1\n  --y "a b" # said\n  --q \'c d\'\n)\ntorchrun r.py "${A[@]}" ${A[@]}',
    "appended": 'A=(--x)\nA+=(--y "1 2")\nB="--z"\nB+=" --w"\ntorchrun r.py ${A[@]} $B',
    "elements with flags and values": 'A=("--split 99,1,0" "--f")\ntorchrun r.py ${A[@]} "${A[@]}"',
    "array by index and length": 'A=(a b c)\ntorchrun r.py "${A[1]}" "${#A[@]}" "${A}"',
    "empty array": 'A=()\ntorchrun r.py "${A[@]}" --x ${A[@]} ""',
    "defaults": 'X=\ntorchrun r.py ${X:-1} ${X-2} ${Y-3} ${Y:-four five} ${Z:=6} $Z ${GIVEN:+7} ${N:+8} "${Y:-a b}"',
    "arguments": 'torchrun r.py $1 "$2" ${3:-x} ${4:-none} "$@" $@ ${9}',
    "environment": 'torchrun r.py $GIVEN "${GIVEN}"',
    "quotes": 'torchrun r.py \'a $X b\' "q\\"q" "d\\$d" "b\\\\b" "k\\k" a\\ b a\'b c\'d',
    "a backslash with a space behind it": "torchrun r.py --x 1 \\ \n--y 2",
    "comments": "torchrun r.py --x a#b # --y\n# torchrun r.py --no\n",
    "a pipe": "torchrun r.py --x 2>&1 | tee logs/a.log",
    "redirections": "torchrun r.py --x >/dev/null 2>&1 --y < /dev/null",
    "lists": "[ -n '' ] && A=1\n[ -n x ] && B=2\n[ a = b ] || C=3\ntorchrun r.py --a $A --b $B --c $C; python s.py",
    "conditions": 'T=2\nif [ $T -gt 1 ] && [[ "$X" == "" ]]; then A=yes; elif [ 1 ]; then A=other; else A=no; fi\n'
    "if [[ $T -eq 1 ]]; then B=1; else B=0; fi\ntorchrun r.py $A $B",
    "else": "if [ -z x ]; then A=1\nelif [[ a != a ]]; then A=2\nelse A=3\nfi\ntorchrun r.py $A",
    "loops": 'for i in 1 2 "3 4"; do A="$A --i $i"; done\ntorchrun r.py $A',
    "here documents": "tee <<END\ntorchrun no.py --x\nEND\ntorchrun r.py --y",
    "functions are passed over": "f() {\n  local A=1\n  torchrun no.py\n}\ntorchrun r.py --x",
    "export": "export A=1 B='2 3'\nreadonly C=4\ntorchrun r.py $A $B $C",
    "groups": "{ A=1; }\ntorchrun r.py $A\n",
    "variables before a command": "A=1 torchrun r.py --x $A",
    "assignments as words": "torchrun r.py model=a --b=c\nX=1",
    "carried over lines": "torchrun \\\n  r.py \\\n  --x \\\n  1",
    "a dollar alone": 'torchrun r.py $ a$ "$"',
    "negation": "if [ ! -z x ]; then A=1; fi\ntorchrun r.py $A",
    "in place": 'X=(1)\ntorchrun r.py "pre${X[@]}post" pre$1post',
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_it_is_read_as_bash_reads_it(name: str, launchers: Path) -> None:
    found = by_us(CONSTRUCTS[name])
    assert found == by_bash(CONSTRUCTS[name], launchers)
    assert found


@pytest.mark.parametrize("path", UPSTREAM, ids=lambda path: path.name)
def test_recipes_are_read_as_bash_reads_them(path: Path, launchers: Path) -> None:
    text = path.read_text()
    found = by_us(text)
    assert found == by_bash(text, launchers)
    assert len(found[0]) > 80


WORDS = st.lists(
    st.sampled_from(["--a", "1", '"x y"', "'q'", "$V", '"$V"', "${L[@]}", '"${L[@]}"', "\\\n", "$((V+1))"])
)


@settings(max_examples=20, deadline=None)
@given(WORDS)
def test_words_in_any_order(words: list[str]) -> None:
    inside = " ".join(word for word in words if '"' not in word)
    text = f'V=3\nL=(a "b c")\nS="{inside}"\nprintf "%s\\0" r.py {" ".join(words)} $S'
    shown = subprocess.run(["/bin/bash", "-c", text], capture_output=True, text=True, timeout=30, check=True).stdout
    (command,) = evaluate(text).commands
    assert [word.text for word in command.words[2:]] == shown.split("\0")[:-1]


def test_nothing_of_a_recipe_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    text = f"X=$(touch {trap})\nY=`touch {trap}`\ntouch {trap}\nsource {trap}\neval 'touch {trap}'\ntorchrun r.py $X $Y"
    outcome = evaluate(text)
    assert not trap.exists()
    assert [word.text for word in outcome.commands[-1].words[2:]] == [f"$(touch {trap})", f"`touch {trap}`"]
    assert "is not read" in outcome.notes[-1][1]


@pytest.mark.parametrize(
    "text", ["A='x", 'A="x', "A=(x", "if [ 1 ]; then", "torchrun $(x", "for i in 1; do", "${", "fi"]
)
def test_what_is_not_bash_is_one_error(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.sh").write_text(text)
    assert main([str(tmp_path / "r.sh")]) == 2
    assert "the recipe cannot be read" in capsys.readouterr().err


# Verdicts -----------------------------------------------------------------------------------------------------------


def verdicts(line: str, script: str = "pretrain_gpt.py") -> dict[str, tuple[str, str]]:
    ((command, at),) = python_commands(evaluate(f"torchrun {script} {line}"))
    return {verdict.flag: (verdict.kind, verdict.remark) for verdict in judge(command, at)}


@pytest.mark.parametrize(
    ("line", "kind", "remark"),
    [
        ("--hidden-size 64", "kept", ""),
        ("--hidden-size=64", "kept", ""),
        ("--disable-bias-linear", "kept", ""),
        ("--use-mcore-models", "without effect", "all models are megatron-core's"),
        ("--ckpt-format torch", "without effect", "distributed format"),
        ("--enable-hf2mg-convert", "without effect", "--load takes a Hugging Face folder as it is"),
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec", "kept", ""),
        ("--spec mindspeed_llm.tasks.models.spec.mamba_spec layer_spec", "refused", "names layers that are not built"),
        ("--reuse-fp32-param", "dropped", "planned with the memory features, step 10"),
        ("--num-layer-list 3,5", "dropped", "planned with uneven pipelines, step 6"),
        # Without these the model would be another one.
        ("--num-experts 8", "kept", ""),
        ("--noop-layers 1", "refused", "planned with no-op layers, step 6"),
        ("--fp8-format hybrid", "refused", "it needs TransformerEngine"),
        ("--batch-size 4", "renamed", "to --micro-batch-size"),
        ("--hidden-size wide", "refused", "got: 'wide' allowed: a whole number"),
        ("--bf16 true", "unknown", "it takes no value"),
        ("--hiden-size 64", "unknown", "--hidden-size?"),
        ('--load "your model ckpt path"', "needs a value", "give a value"),
        ("--load $1", "needs a value", "set $1"),
        ("--load /path/to/model", "needs a value", "give a value"),
    ],
)
def test_what_becomes_of_a_flag(line: str, kind: str, remark: str) -> None:
    ((found, why),) = verdicts(line).values()
    assert (found, remark in why) == (kind, True), why


def test_other_scripts_have_flags_of_their_own() -> None:
    found = verdicts("--input $DATA --workers 4 --n-subs 2 --pack --hidden-size 3", "preprocess_data.py")
    kinds = {flag: kind for flag, (kind, _) in found.items()}
    assert kinds == {
        "--input": "needs a value",
        "--workers": "kept",
        "--n-subs": "without effect",
        "--pack": "refused",
        "--hidden-size": "unknown",
    }


def test_groups_that_a_recipe_passes_and_does_not_have_are_nothing() -> None:
    found = verdicts("--split 100,0,0 $MOE_ARGS --bf16 $NONE --load $LOAD --data-path 1 $A 1 $B")
    assert found["--split"] == found["--bf16"] == ("kept", "")
    assert found["--load"] == ("needs a value", "set $LOAD")
    assert found["--data-path"] == ("needs a value", "set $A, $B")
    assert verdicts("--input a --workers 4 $NONE", "preprocess_data.py")["--workers"] == ("kept", "")


def test_flags_are_judged_together() -> None:
    line = (
        "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1"
        " --micro-batch-size 1 --train-iters 1 --mock-data --vocab-size 99 --pipeline-model-parallel-size 2"
    )
    ((command, at),) = python_commands(evaluate(f"torchrun --nproc_per_node 2 --nnodes=1 pretrain_gpt.py {line}"))
    assert "layers" in together(command, at, judge(command, at))
    ((command, at),) = python_commands(evaluate(f"torchrun --nproc_per_node 2 pretrain_gpt.py {line} --num-layers 4"))
    assert together(command, at, judge(command, at)) == ""


# The new recipe -----------------------------------------------------------------------------------------------------


def rewritten(text: str) -> str:
    environ = {"GIVEN": "by the environment"}
    judged = [(command, at, judge(command, at)) for command, at in python_commands(evaluate(text, ARGUMENTS, environ))]
    return rewrite(text, judged, ARGUMENTS, environ)


DROPS = {
    "in a string": 'A="\n  --seed 1 \\\n  --reuse-fp32-param \\\n  --bf16 \\\n"\ntorchrun pretrain_gpt.py $A',
    "last in a string": 'A="\n  --seed 1 \\\n  --num-layer-list 3,5\n"\ntorchrun pretrain_gpt.py $A',
    "in an array": "A=(\n  --seed 1\n  --num-layer-list 3,5 # uneven\n  --reuse-fp32-param\n  --bf16\n)\n"
    "torchrun pretrain_gpt.py ${A[@]}",
    "on one line": 'A="--seed 1 --reuse-fp32-param --num-layer-list 3,5"\ntorchrun pretrain_gpt.py $A',
    "in the command": "torchrun pretrain_gpt.py \\\n  --reuse-fp32-param \\\n  --seed 1 \\\n  --num-layer-list 3,5 \\\n"
    "  | tee x",
    "last in the command": "torchrun pretrain_gpt.py --seed 1 \\\n  --reuse-fp32-param \\\n  --swap-attention\n"
    "python x.py",
    "with a variable for a value": 'L="3,5"\nA="--num-layer-list $L \\\n --seed 1"\n'
    'torchrun pretrain_gpt.py $A --num-layer-list "${L}"',
    "before groups that are not set": 'A="--seed 1 \\\n --num-layer-list 3,5"\n'
    "torchrun pretrain_gpt.py $A $MOE --bf16 $X",
    "renamed": 'A="--batch-size 4 --model-parallel-size 2"\ntorchrun pretrain_gpt.py $A --checkpoint-activations',
    "in a branch": "A=1\nif [ $A -eq 1 ]; then\n    B=(--reuse-fp32-param --seed 1)\nfi\n"
    "torchrun pretrain_gpt.py ${B[@]}",
}


@pytest.mark.parametrize("name", DROPS)
def test_bash_starts_the_new_recipe_without_what_was_dropped(name: str, launchers: Path) -> None:
    new = rewritten(DROPS[name])
    assert not re.search(r"reuse-fp32|layer-list|swap-att|--batch|--model-par|checkpoint-act", re.sub("#.*", "", new))
    before, after = by_bash(DROPS[name], launchers), by_bash(new, launchers)
    gone = {"--reuse-fp32-param", "--num-layer-list", "3,5", "--swap-attention"}
    renamed = {
        "--batch-size": "--micro-batch-size",
        "--model-parallel-size": "--tensor-model-parallel-size",
        "--checkpoint-activations": "--recompute-activations",
    }
    assert after == [[renamed.get(word, word) for word in call if word not in gone] for call in before]
    assert "# migrate: " in new


def test_a_recipe_with_nothing_to_change_stays_as_it_is() -> None:
    text = 'A="--seed 1 \\\n --use-flash-attn"\nmkdir -p logs\ntorchrun pretrain_gpt.py $A | tee logs/a.log\n'
    assert rewritten(text) == text


def test_refused_flags_that_make_the_model_stay_in() -> None:
    assert "--num-experts 8" in rewritten("torchrun pretrain_gpt.py --num-experts 8 --reuse-fp32-param")


def test_the_folder_of_the_log_is_made(launchers: Path) -> None:
    new = rewritten("torchrun pretrain_gpt.py --seed 1 | tee logs/deep/a.log")
    assert "mkdir -p logs/deep\ntorchrun" in new


def test_a_script_that_has_another_name_here() -> None:
    assert "python ./convert_ckpt.py" in rewritten("python ./convert_ckpt_v2.py --load-dir a --save-dir b")


def test_a_flag_that_is_written_in_pieces_is_an_error() -> None:
    with pytest.raises(ConfigError, match="not written in one place"):
        rewritten("X=fp32\ntorchrun pretrain_gpt.py --reuse-$X-param")


# The command --------------------------------------------------------------------------------------------------------


def test_the_report_names_what_is_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.sh"
    recipe = next(path for path in UPSTREAM if "qwen25" in path.name)
    line = next(n for n, text in enumerate(recipe.read_text().splitlines(), 1) if text.startswith("CKPT_LOAD_DIR"))
    assert main([str(recipe), "--write", str(new)]) == 1
    out = capsys.readouterr().out
    assert f"--load your model ckpt path: set CKPT_LOAD_DIR (line {line})" in out
    assert "--use-mcore-models: all models are megatron-core's" in out
    assert "The recipe of this project for it: examples/qwen25/pretrain_qwen25_7b.sh" in out
    assert "refused" not in out
    filled = new.read_text()
    for placeholder in ("your model ckpt path", "your model save ckpt path", "your data path", "your tokenizer path"):
        filled = filled.replace(placeholder, "somewhere")
    new.write_text(filled)
    assert os.access(new, os.X_OK)
    assert main([str(new)]) == 0


def test_a_script_that_is_not_here_says_what_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "tune.sh"
    recipe.write_text("torchrun posttrain_gpt.py --stage sft\n")
    assert main([str(recipe)]) == 1
    out = capsys.readouterr().out
    assert "posttrain_gpt.py is not here: instruction tuning is planned, step 8" in out
    assert "--stage sft: planned with instruction tuning, step 8" in out


def test_flags_that_reach_no_command_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.sh"
    text = 'FORGOTTEN="--bf16"\ntorchrun pretrain_gpt.py --seed 1 # --fp16\n    --lr 1\n# --adam-beta1 0\n'
    recipe.write_text(text)
    main([str(recipe)])
    assert "passed to no command: --bf16 --lr\n" in capsys.readouterr().out


def test_run_stops_where_something_has_to_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.sh"
    recipe.write_text(f"touch {tmp_path}/ran\ntorchrun pretrain_gpt.py --reuse-fp32-param --load 'your path'\n")
    assert main([str(recipe), "--run"]) == 2
    err = capsys.readouterr().err
    assert "--reuse-fp32-param: dropped" in err
    assert "--load: needs a value" in err
    assert not (tmp_path / "ran").exists()


def test_run_runs_the_old_recipe(tmp_path: Path, launchers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "r.sh"
    recipe.write_text(
        f"echo $1 >{tmp_path}/ran\npython preprocess_data.py --input a --output-prefix b >/dev/null\nexit 7\n"
    )
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(sys, "executable", str(launchers / "python"))
    assert main([str(recipe), "--run", "word"]) == 7
    assert (tmp_path / "ran").read_text() == "word\n"
    assert json.loads((tmp_path / "calls").read_text()) == [
        "preprocess_data.py",
        "--input",
        "a",
        "--output-prefix",
        "b",
    ]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("pretrain_qwen25_72b_32k_ptd", "examples/qwen25/pretrain_qwen25_72b_32k.sh"),
        (
            "pretrain_qwen25_7b_8k_pack_ptd_A3",
            "SEQ_LENGTH=8192 NODE_TYPE=Snt9b23 examples/qwen25/pretrain_qwen25_7b.sh",
        ),
        ("pretrain_qwen25_72b_4k_pack_A3", "NODE_TYPE=Snt9b23 examples/qwen25/pretrain_qwen25_72b.sh"),
        ("pretrain_llama2_7b_ptd", "examples/llama2/pretrain_llama2_7b.sh"),
        ("pretrain_llama32_1b_8k_ms", "examples/llama32/pretrain_llama32_1b.sh"),
        ("pretrain_qwen2_0point5b_4k_ptd", "examples/qwen2/pretrain_qwen2_0point5b.sh"),
        ("data_convert_qwen25_pretrain", "examples/qwen25/data_qwen25_pretrain.sh"),
        ("pretrain_gemma2_9b_ptd", ""),
        ("tune_qwen25_7b_4k_full_ptd", ""),
        ("train", ""),
    ],
)
def test_the_recipe_of_ours_by_the_name_of_theirs(name: str, ours: str) -> None:
    assert counterpart(name) == ours
    path = Path(__file__).resolve().parents[3] / ours.rpartition(" ")[2]
    assert path.exists()
