"""Mistakes in the words of `ultrascale plan`: each is one line that names the field, and exit code 2."""

import pytest

from tests.commands import refused

MISTAKES = {
    "": "verb=''",
    "guess debug": "verb='guess'",
    "compile debug --gpus 9": "num_devices=9",
    "compile debug --fake-devices 2": "Unrecognized options: --fake-devices",
    "memory --gpu tpu": "gpu='tpu': choose one of",
    "memory debug --gpus 2000000": "gpus=2000000: must be from 1 to 1048576",
    "memory --global-batch-tokens 4Mi --train.global-batch 8": "train.global_batch=8: --global-",
    "memory mixtral_8x7b --moe.a2a_groups 3": "moe.a2a_groups=3: must divide mesh.ep=8",
    "guide --tokens many": "tokens='many': write a number of tokens, as 300B",
    "guide --failure-hours 9": "failure_hours=9.0: give --restart-s too",
    "schedule gpipe": "schedule='gpipe': choose one of afab",
    "schedule 1f1b --costs 1,1": "costs='1,1': write the times",
    "schedule --figure own.gif": "figure='own.gif': must end in .png",
    "schedule missing.csv": "pp.schedule='missing.csv': there is no such file",
    "search debug --fixed tensor=2": "fixed='tensor=2'",
    "search llama3_8b --mesh tp=8 --fixed tp=4": "fixed='tp=4': another option says tp=8",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words, capsys):
    said = refused(capsys, "plan", *words.split())
    assert said.startswith(MISTAKES[words]) and said.count("\n") == 1
