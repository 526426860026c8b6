"""The figures of lesson 00: all turns and their median."""

from course_lib.lessons.start import figures as start


def test_all_turns_are_drawn_and_their_median_is_told():
    turns = {
        "one rank\n2 threads each": [20.0, 10.0, 30.0],
        "one rank, one thread\n1 thread each": [12.0, 11.0, 13.0],
        "2 ranks\n1 thread each": [30.0, 41.0, 36.0],
    }
    figure = start.throughput(40.0, turns)
    assert figure.get_suptitle() == "2 ranks: 1.80 times the speed of one rank, predicted 2"
    (axes,) = figure.axes
    assert [list(line.get_ydata()) for line in axes.lines] == list(turns.values())
    assert sorted(bar.get_height() for bar in axes.patches) == [12, 20, 36, 40]


def test_the_title_says_both_times():
    figure = start.start_times({1: 2.0, 4: 8.0}, {1: [0.1, 0.2, 0.3], 4: [0.5, 0.4, 0.6]})
    assert figure.get_suptitle() == "4 processes start in 0.50 s; fresh interpreters would take 8.0 s"
