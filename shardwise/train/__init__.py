"""What one rank of a job does: ``worker`` from its files to its export, ``trainer`` the loop in it, ``step`` one step.

``setup`` loads the model, ``data`` the rows, ``optim`` and ``lr`` make the update. ``saving``, ``keeping``,
``identity`` and ``previous`` are about checkpoints and what lies in the output folder, ``exporting`` makes a model of
one. ``callbacks`` are called by ``dispatch``; ``metrics``, ``progress``, ``status``, ``trackers``, ``profiling`` and
``early_stopping`` are some. Launches nothing.
"""
