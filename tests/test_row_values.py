"""What a row's token is worth to a call that ends with its slowest row."""

import pytest

from dspark_hf.row_values import HORIZON, RowPace, banked_steps, row_values, step_shares

SHARED, OWN = 0.05, 0.004


def test_shares_of_an_affine_step():
    def plain(rows):
        return SHARED + OWN * rows

    assert step_shares(plain(1), plain(16), 16) == pytest.approx((SHARED, OWN))
    assert step_shares(0.05, 0.05, 1) == pytest.approx((0.05, 0.0))
    assert step_shares(0.06, 0.05, 4) == pytest.approx((0.05, 0.0))  # noise: more rows never cost less


def test_equal_rows_are_worth_the_same():
    assert row_values([100, 100, 100], [1.5, 1.5, 1.5], SHARED, OWN) == pytest.approx([1.0, 1.0, 1.0])


def test_rows_that_will_finish_last_are_worth_more():
    behind = row_values([120, 100, 100], [2.0, 2.0, 2.0], SHARED, OWN)
    slow = row_values([100, 100, 100], [1.2, 2.0, 2.0], SHARED, OWN)
    for values in (behind, slow):
        assert values[0] > 1.0 > values[1] == values[2]
        assert sum(values) == pytest.approx(3.0)
        # even a row that is far ahead saves its own share of every step
        assert min(values) >= 3 * OWN / (SHARED + 3 * OWN)
    # as the end comes near, the same lag weighs more
    assert row_values([30, 10, 10], [2.0, 2.0, 2.0], SHARED, OWN)[0] > behind[0]


def test_a_distant_limit_says_nothing():
    near, far = (row_values([n, n, n - 5], [1.4, 2.0, 2.0], SHARED, OWN) for n in (HORIZON, 100_000))
    assert near == pytest.approx(far)
    assert row_values([1000, 400], [2.0, 1.0], SHARED, OWN)[1] < 1.0  # done long before, even at half the pace


def test_banked_steps_add_up_to_the_time_saved():
    """Whatever the rounds bring, their sum is what plain decoding would have taken."""
    rounds = [[1, 4, 8], [3, 1, 8], [8, 2, 1], [1, 1, 3], [7, 12, 0]]
    remaining, banked = [20, 20, 20], 0.0
    for committed in rounds:
        banked += banked_steps(remaining, committed, SHARED, OWN)
        remaining = [count - got for count, got in zip(remaining, committed)]
    assert remaining == [0, 0, 0]
    assert banked == pytest.approx(20.0)


def test_a_plain_step_banks_one_step():
    assert banked_steps([7, 30, 12], [1, 1, 1], SHARED, OWN) == pytest.approx(1.0)
    assert banked_steps([30, 30], [1, 8], SHARED, OWN) < 2.0  # the other row still has to be waited for


def test_pace_is_drawn_towards_the_mean_and_follows_changes():
    pace = RowPace()
    assert pace.of([0, 1]) == [1.0, 1.0]
    for _ in range(3):
        pace.update([0, 1], [1, 7])
    slow, fast = pace.of([0, 1])
    assert 1.0 < slow < 4.0 < fast < 7.0
    for _ in range(60):
        pace.update([0, 1], [7, 1])
    slow, fast = pace.of([1, 0])
    assert slow < 2.5 and fast > 5.5
    assert pace.of([5, 0])[0] > 1.0  # a row not seen yet is taken for an average one
