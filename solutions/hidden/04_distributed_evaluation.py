"""Hidden cases of lesson 04: other numbers of rows and ranks, drawn anew at each grading."""

from course_lib.grading.tasks import evaluation, metric

DRAW = {
    "evaluation.gather": lambda rng: evaluation.GATHER.draw(rng, (2, 3, 4)),
    "evaluation.macro_f1": lambda rng: evaluation.MACRO_F1.draw(rng, (2, 4)),
    "evaluation.perplexity": lambda rng: evaluation.PERPLEXITY.draw(rng, (2, 4)),
    "evaluation.metric": lambda rng: metric.METRIC.draw(rng, (2, 3, 4)),
}
