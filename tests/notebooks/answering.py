"""Startup file of a lesson's kernel: a learner who answers each question when its cell has run, as in JupyterLab."""


def start():
    from types import SimpleNamespace

    from IPython import get_ipython

    from course_lib.lessons import notebook

    notebook.learner_files = SimpleNamespace(is_live=lambda: True)
    answered = []

    def answer(_):
        for question in [each.question for each in notebook._predictions.values() if each.question]:
            if question not in answered:
                answered.append(question)
                question.field.value = next(iter(question.choices), "1")
                question.button.click()

    get_ipython().events.register("post_run_cell", answer)


start()
del start  # the kernel's names are the lesson's
