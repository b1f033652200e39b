"""A user's own table: what is read is what was written, and what cannot be run is refused, entry by entry."""

import dataclasses

import pytest

from ultrascale_jax.config import (
    SCHEDULES,
    Config,
    MeshConfig,
    PipelineConfig,
    TrainConfig,
    UserError,
)
from ultrascale_jax.parallel.pipeline.schedules import build, of_config
from ultrascale_jax.parallel.pipeline.table_csv import read_csv
from ultrascale_jax.plan.schedules.measures import formula
from ultrascale_jax.plan.schedules.text import write_csv

TABLE = """\
0F0,0F1,,,0B0,0B1
,1F0,1F1 1B0,1B1,,
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / "mine.csv"


def refusal(path):
    with pytest.raises(UserError) as error:
        read_csv(path)
    message = str(error.value)
    assert message.startswith(f"pp.schedule={str(path)!r}: ")
    assert "\n" not in message
    return message.removeprefix(f"pp.schedule={str(path)!r}: ")


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_again(name, file):
    for p, m in ((1, 2), (2, 4), (4, 8)):
        schedule = build(name, p, m)
        write_csv(schedule, file)
        # One rank, or one stage a rank, is a loop and a V.
        placement = "loop" if p == 1 else schedule.placement
        found = read_csv(file)
        assert found == dataclasses.replace(schedule, name="mine.csv", placement=placement)
        assert formula(found) is None


def test_spaces_a_byte_order_mark_short_rows_and_empty_last_lines_do_no_harm(file):
    file.write_text("\ufeff 0F0 , 0F1,,,0B0,0B1\n,1F0,1B0  1F1,1B1\n\n \n", encoding="utf-8")
    plain = file.with_name("plain.csv")
    plain.write_text(TABLE)
    assert read_csv(file).ticks == read_csv(plain).ticks


def test_a_full_backward_among_split_ones_is_both_halves_in_one_tick(file):
    file.write_text("0F0,0F1,0B0,0I1,0W1\n")
    schedule = read_csv(file)
    assert schedule.split
    assert dict(schedule.ticks[2][0]) == {"B": (0, 0), "W": (0, 0)}


@pytest.mark.parametrize(
    "old, new, rank, tick, why",
    [
        ("0F0", "", 1, 1, "1F0: it needs 0F0, which is missing"),
        ("0F0", "0F0;0F1", 0, 0, "'0F0;0F1' is no operation"),
        ("0F0", "0F0,0F0", 0, 1, "0F0: it has run in tick 0 already"),
        ("0F0", "0F999999", 0, 0, "0F999999: there is no microbatch 2 anywhere"),
        ("1F1 1B0", "1B0 1F1 0B0", 1, 2, "0B0: stage 0 is on rank 0"),
        ("0B0", "0W0 0I0 0W0", 0, 4, "0W0: a rank runs one operation of a kind in a tick"),
    ],
)
def test_an_illegal_table_is_refused_with_its_entry(file, old, new, rank, tick, why):
    assert old in TABLE
    text = TABLE.replace(old, new, 1)
    file.write_text(text, encoding="utf-8")
    cell = text.splitlines()[rank].split(",")[tick]
    place = f"row {rank + 1} (rank {rank}), column {tick + 1} (tick {tick}), cell {cell!r}"
    message = refusal(file)
    assert message.startswith(place)
    assert message.removeprefix(place).lstrip(",: ").startswith(why)


@pytest.mark.parametrize(
    "content, message",
    [
        (TABLE.replace("0B1", ""), "row 1 (rank 0): 0B1 is missing"),
        (TABLE.replace("0B0", "0I0"), "row 1 (rank 0): 0W0 is missing"),
        (TABLE.replace("0F0", "2F0"), "3 stages cannot be spread evenly over 2 rows (ranks)"),
        ("", "there is no operation in it"),
        ("0F0\n\n1F0,1B0\n0B0", "row 2 (rank 1): has no operation; give the rank a stage, or take"),
        (",,\n0F0,,0B0\n", "row 1 (rank 0): has no operation"),
        ('"0F0', "cannot be read: unexpected end of data"),
    ],
)
def test_a_table_that_lacks_something_is_refused(file, content, message):
    file.write_text(content)
    assert refusal(file).startswith(message)


def test_stages_that_are_neither_a_loop_nor_a_v_are_refused(file):
    write_csv(build("zb_v", 3, 6), file)
    rows = file.read_text().splitlines()
    file.write_text("\n".join([rows[1], rows[0], rows[2]]))
    assert ", 1F0: stage 1 is on rank 1" in refusal(file)
    write_csv(build("interleaved", 3, 6), file)
    rows = file.read_text().replace("3F0", "4F0", 1).splitlines()
    file.write_text("\n".join(rows))
    assert ", 4F0: stage 4 is on rank 1" in refusal(file)


@pytest.mark.parametrize(
    "section, message",
    [
        ({"mesh": MeshConfig(pp=4, fsdp=1)}, "mesh.pp=4: the table {file} is for 2"),
        ({"train": TrainConfig(microbatches=4)}, "train.microbatches=4: the table {file} is for 2"),
    ],
)
def test_a_run_takes_a_table_that_is_made_for_it(file, section, message):
    file.write_text(TABLE)
    pp = PipelineConfig(schedule=str(file))
    wanted = {"mesh": MeshConfig(pp=2, fsdp=1), "train": TrainConfig(microbatches=2)}
    with pytest.raises(UserError) as error:
        of_config(Config(pp=pp, **(wanted | section)))
    assert str(error.value).startswith(message.format(file=file))
    assert of_config(Config(pp=pp, **wanted)) == read_csv(file)
