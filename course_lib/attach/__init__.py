"""Brings our tools into somebody else's job, whose script stays as it is: `course meter` and `course watch`.

The command (:mod:`~course_lib.attach.command`) starts the job with a folder in front of PYTHONPATH whose
``sitecustomize.py`` every Python process runs first. It waits for torch.distributed to be imported, and starts the
tools on each rank once its process group stands (:mod:`~course_lib.attach.inside`). A launcher that hands its
environment on to its ranks, as torchrun and accelerate do, needs to know nothing of it.
"""
