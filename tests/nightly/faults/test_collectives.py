"""Jobs of many CPU processes compute the same numbers in every run: gloo pairs no collective with another one.

`REPEAT=3` runs each job three times.
"""

import os

import pytest

STEPS = 200
REPEAT = int(os.environ.get("REPEAT", "1"))
WORDS = (
    *("--train.steps", str(STEPS), "--train.eval-every", "0", "--checkpoint.every", "0"),
    *("--optim.lr", "1e-3", "--train.remat", "none"),
)
# Vocabularies beside d_model 32: the collectives of one kind are of many sizes, or of few.
UNEQUAL, EQUAL = ("--model.vocab-size", "4096"), ("--model.vocab-size", "32")
# name: (processes, devices of each, words)
JOBS = {
    "fsdp2_unequal": (2, 1, UNEQUAL),
    "fsdp2_equal": (2, 1, (*EQUAL, "--model.d-ff", "32")),
    "fsdp2_accumulated": (2, 1, (*UNEQUAL, "--train.microbatches", "4", "--train.zero", "2")),
    "dp2_fsdp2_unequal": (2, 2, (*UNEQUAL, "--mesh", "dp=2,fsdp=2")),
    "tp4_unequal": (2, 2, (*UNEQUAL, "--mesh", "tp=4", "--model.num-kv-heads", "4")),
    "fsdp4_equal": (4, 1, (*EQUAL, "--model.d-ff", "32")),
    "fsdp2_sp2_unequal": (4, 1, (*UNEQUAL, "--mesh", "fsdp=2,sp=2")),
    "cp4_unequal": (4, 1, (*UNEQUAL, "--mesh", "cp=4", "--train.remat", "full")),
    "pp2_fsdp2_unequal": (
        4, 1, (*UNEQUAL, "--mesh", "pp=2,fsdp=2", "--train.microbatches", "2"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_many_processes_give_the_losses_of_one_in_every_run(name, job, tmp_path):
    processes, devices, words = JOBS[name]
    # One process has no gloo: its losses on as many devices are the truth, to the rounding of another order.
    alone = job(tmp_path / "alone", *WORDS, *words, processes=1, devices=processes * devices)
    alone.check_ends(0)
    expected = {step: row["loss"] for step, row in alone.steps().items()}
    assert len(expected) == STEPS
    runs = []
    for number in range(REPEAT):
        many = job(tmp_path / f"{number}", *WORDS, *words, processes=processes, devices=devices)
        many.check_ends(*[0] * processes)
        runs.append(many.losses())
        losses = {step: row["loss"] for step, row in many.steps().items()}
        assert losses == pytest.approx(expected, rel=1e-5)
    assert all(run == runs[0] for run in runs)
