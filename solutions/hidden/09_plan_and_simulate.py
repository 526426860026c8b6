"""Hidden cases of lesson 09: other models, links and machines, drawn anew at each grading."""

from course_lib.grading.tasks import planner, planning

DRAW = {
    "plan.memory": lambda rng: planning.MEMORY.draw(rng, 9)[1:],  # the first is public whatever the generator
    "plan.all_reduce": lambda rng: planning.ALL_REDUCE.draw(rng, 9),
    "plan.search": lambda rng: planning.SEARCH.draw(rng, 9),
    "plan.planner": lambda rng: planner.PLANNER.draw(rng, 10),
}
