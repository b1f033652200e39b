"""The order in which a GPU computes and exchanges."""

from ultrascale_jax.parallel.pipeline.list_scheduler import Task, order


def after(*sources: int) -> frozenset[int]:
    return frozenset(sources)


def test_two_chains_hide_each_others_exchanges():
    """Each computes, exchanges and computes: 6 s alone, and both 8 s, as long as they compute."""
    tasks = {
        0: Task(2), 1: Task(2, after(0), queue=0), 2: Task(2, after(1)),
        3: Task(2), 4: Task(2, after(3), queue=1), 5: Task(2, after(4)),
    }  # fmt: skip
    ends = order(tasks, lookahead=1)
    assert ends == {0: 2, 1: 4, 3: 4, 4: 6, 2: 6, 5: 8}
    assert list(ends) == [0, 1, 3, 4, 2, 5]


def test_exchanges_of_a_queue_keep_their_order():
    def started(queue: int) -> list[int]:
        return list(order({0: Task(5), 1: Task(1, after(0), queue=0), 2: Task(1, queue=queue)}, 1))

    assert started(0) == [0, 1, 2]
    assert started(1) == [2, 0, 1]


def test_a_long_computation_waits_for_an_exchange_that_is_foreseen():
    tasks = {0: Task(1), 1: Task(4, after(0), queue=0), 2: Task(1, after(1)), 3: Task(10)}
    assert order(tasks, lookahead=0) == {3: 10, 0: 11, 1: 15, 2: 16}
    assert order(tasks, lookahead=1) == {0: 1, 1: 5, 3: 11, 2: 12}


def test_an_exchange_waits_in_line_only_if_a_computation_would_delay_it():
    def ends(computation: float) -> dict[int, float]:
        return order({0: Task(3, queue=0), 1: Task(3, queue=1), 2: Task(computation)}, 1)

    assert ends(6) == {0: 3, 1: 6, 2: 6}
    assert ends(4) == {0: 3, 2: 4, 1: 7}
