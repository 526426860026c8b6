"""Figures of wrong gradients: the titles say what is drawn."""

from course_lib.lessons.gradients import figures as gradients


def test_the_title_says_how_far_losses_and_norms_are_apart():
    figure = gradients.curves({"mean": [2.0, 1.0], "sum": [2.0, 1.001]}, {"mean": [1.0, 2.0], "sum": [3.0, 6.0]})
    assert figure.get_suptitle() == "The losses are 1e-03 nats apart, the gradients differ by a factor of 3.00"
    losses, norms = figure.axes
    assert [list(line.get_ydata()) for line in norms.lines] == [[1, 2], [3, 6]] and len(losses.lines) == 2
    assert {text.get_text() for text in norms.texts} == {"mean", "sum"}


def test_the_settings_that_show_are_counted_and_coloured():
    figure = gradients.by_setting({"SGD": 0.5, "Adam": 1e-6, "clipped": 0.01}, seen=0.01)
    assert figure.get_suptitle() == "1 of 3 settings show a wrong gradient in the loss"
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} == {"0.5", "1e-06", "0.01"}
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert colours["0.5"] != colours["1e-06"] == colours["0.01"]
