"""Hidden cases of lesson 11: other runs, configs and attempts, drawn anew at each grading."""

from course_lib.grading.tasks import tracker, tracking

DRAW = {
    "tracking.groups": lambda rng: tracking.GROUPS.draw(rng, ((2, False), (3, True))),
    "tracking.redact": lambda rng: tracking.REDACT.draw(rng, 8),
    "tracking.resumed": lambda rng: tracking.RESUMED.draw(rng, 12),
    "tracking.tracker": lambda rng: tracker.TRACKER.draw(rng, (2, 4)),
}
