"""Figures of a ring and of a router say what is where."""

from ultrascale_jax.figures.ring import Blocks, Ring
from ultrascale_jax.figures.routes import Routes

TEXT = {"name": "a", "title": "", "caption": ""}


def test_keys_travel_from_each_rank_to_the_next():
    steps = [[0.5] * 3, [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
    figure = Ring(**TEXT, pieces={"ring": ["a", "b", "c"]}, needed={"ring": steps})
    owners = [[figure.owner("ring", step, rank) for rank in range(3)] for step in range(3)]
    assert owners == [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]]
    assert figure.table().rows[4] == ("ring", "step 1", "rank 1", "a", 100.0)


def test_zigzag_gives_every_rank_as_many_blocks_in_each_step_and_natural_order_does_not():
    figure = Blocks(**TEXT, panels={"natural": [0, 0, 1, 1], "zigzag": [0, 1, 1, 0]})
    work = {}
    for title, ranks in figure.panels.items():
        for query, key, step in figure.steps(title):
            place = title, ranks[query], step
            work[place] = work.get(place, 0) + (1 if key < query else 0.5)
    zigzag = {place[1:]: blocks for place, blocks in work.items() if place[0] == "zigzag"}
    assert zigzag == {(rank, step): 2.0 for rank in (0, 1) for step in (0, 1)}
    assert {place[1:]: n for place, n in work.items() if place[0] == "natural"} == {
        (0, 0): 2.0,
        (1, 0): 2.0,
        (1, 1): 4.0,
    }


def test_an_experts_load_counts_the_tokens_that_chose_it():
    figure = Routes(**TEXT, choices=[[0, 2], [2, 3], [2, 0], [1, 2]], experts=4, ranks=2)
    assert figure.loads == [2, 1, 4, 1]
    assert figure.table().rows[2] == ("expert 2", "rank 1", 4)
