"""Pipeline parallelism: schedules as tables of actions, which are checked, simulated, drawn and run.

``schedules.make`` writes a table, ``passes.lower`` adds its sends and receives, ``validation.check`` proves it,
``simulation.simulate`` gives its time line, ``search.search`` picks among tables. None of these imports torch.
"""
