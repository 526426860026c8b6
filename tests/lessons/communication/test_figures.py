"""The bill of a slow link: its title says the finding."""

from course_lib.lessons.communication import figures as communication


def test_the_bill_names_the_slowest_link():
    figure = communication.bill(0.02, {"fast": 0.005, "slow": 0.18})
    assert figure.get_suptitle() == "At slow a step waits 90% of its time"
    assert len(figure.axes[0].patches) == 4
