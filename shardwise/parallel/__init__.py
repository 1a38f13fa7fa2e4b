"""A model under a plan: one file for each axis of a split, and ``apply``, which puts them in order.

``mesh`` gives the groups; ``tensor``, ``pipeline`` (with ``border``), ``fsdp``, ``replicate`` and ``buckets`` split;
``recompute``, ``compiled``, ``precision``, ``dropout``, ``balance`` and ``deferred`` say how blocks run. ``model``
hides all of it behind one call, ``engine`` runs a schedule's actions on torch's runtime; ``loss`` and ``clip`` add up
what is split, ``agreement`` lets one rank find out for all.
"""
