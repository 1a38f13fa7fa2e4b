"""From a command or a script to what runs: every question is answered here before a process starts. Imports no torch.

``resolve`` makes the refusals and the plan, ``automatic`` and ``planning`` ask the planner, ``measuring`` times this
machine, ``describing`` asks a child about the model, ``hub`` finds models and rows. The commands: ``training``,
``checking``, ``exporting``, ``preparing`` (tokenises ahead), ``surveying`` (shows rows); ``fewer`` plans a run anew
that has lost devices.
"""
