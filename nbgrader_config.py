"""nbgrader on the course's folders: one assignment, whose notebooks are the lessons' exercises.

    nbgrader generate_assignment      solutions/NN_topic.ipynb            -> exercises/NN_topic.ipynb
    nbgrader autograde                submitted/LEARNER/NN_topic.ipynb    -> autograded/LEARNER/NN_topic.ipynb
    nbgrader generate_feedback        autograded/LEARNER/NN_topic.ipynb   -> feedback/LEARNER/NN_topic.html
    nbgrader export                   the grades of all                   -> grades.csv

``--notebook 02_data_parallel`` does one lesson alone. nbgrader runs what learners wrote with your rights: grade people
whom you don't know with ``course grade``, which has a sandbox.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent

c = get_config()  # noqa: F821 (traitlets defines it where it reads this file)

# nbgrader wants a folder an assignment; ours is this one, and the notebooks lie flat in its solutions/ and exercises/.
c.CourseDirectory.root = str(HERE.parent)
c.CourseDirectory.assignment_id = HERE.name
c.CourseDirectory.directory_structure = "{assignment_id}/{nbgrader_step}/{student_id}"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"
c.CourseDirectory.db_url = f"sqlite:///{HERE / 'gradebook.db'}"
c.CourseDirectory.ignore = [
    ".ipynb_checkpoints",
    "__pycache__",
    "*.pyc",
    "hidden",
    "planted",
    "equivalent.py",
    "README.md",
]
c.NbGrader.logfile = ""
c.ClearSolutions.code_stub = {"python": 'raise NotImplementedError("write your answer here")'}
c.Autograde.create_student = True
c.ExecutePreprocessor.timeout = 300
c.ExportApp.plugin_class = "nbgrader.plugins.export.CsvExportPlugin"
