"""Processes of a job: how they start, where they are, and how they end. Most of it imports no torch.

``agent`` and ``elastic`` start workers from the ``forkserver``, ``worker`` is what one runs; ``stop``, ``alive``,
``culprit``, ``whereabouts`` and ``restarts`` are about how they end. ``devices`` chooses what a job runs on, ``output``
and ``lock`` keep its folder, ``heap`` its memory. Several machines: ``nodes``, ``meeting``, ``beacon``, ``machines``.
Scripts: ``contact``, ``place``, ``script``, ``script_worker``, ``join``.
"""
