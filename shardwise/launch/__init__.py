"""From a command or a script to processes, and how they end. Most of it imports no torch.

What runs: ``resolve`` makes the refusals, ``automatic`` and ``planning`` ask the planner, ``measuring`` times this
machine, ``describing`` asks a child about the model, ``preparing`` tokenises ahead, ``hub`` and ``paths`` find files.
The processes: ``agent`` and ``elastic`` start them from the ``forkserver``, ``worker`` is what one runs; ``stop``,
``alive``, ``culprit``, ``whereabouts`` and ``restarts`` are about how they end. Several machines: ``nodes``,
``meeting``, ``beacon``, ``machines``. Scripts: ``contact``, ``place``, ``script``, ``script_worker``, ``join``.
"""
