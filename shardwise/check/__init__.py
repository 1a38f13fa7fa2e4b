"""A plan proved on a small copy of its model, and what a model costs and can be split by, without building it whole.

The proof: ``small`` makes the copy, ``layouts`` says what of the plan is run on it, ``reference`` is one process in
float64 (``exact``), ``ranks`` a rank, ``outputs`` and ``findings`` say where a difference begins. The description:
``description`` for ``model show``, ``costing`` (with ``costs`` and ``amounts``) for the planner.
"""
