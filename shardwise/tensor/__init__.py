"""How the layers of a block are split over the tensor axis: found by a search, proven, and applied.

``table`` is what comes of it. ``find`` leads from a model to one: ``trace`` and ``regions`` say how features belong
together, ``search`` and ``frontier`` what is best, ``kind`` makes a table of it, ``simulate`` proves it on all ranks,
``cache`` keeps it; ``alternatives`` offers others, ``edited`` takes one that a user wrote. ``execute`` applies a table:
``forwards`` compute on local weights, with the ``collectives`` of a ``group``.
"""
