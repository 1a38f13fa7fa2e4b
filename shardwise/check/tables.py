"""The proven tables of a model, for one who asks for many: the search of each degree is made once."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from shardwise.parallel.tensor import on_small_copy
from shardwise.tensor.cache import TableCache
from shardwise.tensor.find import TableSearch
from shardwise.tensor.table import ShardingTable


class ProvenTables:
    """The tables of ``model``, each as :func:`shardwise.parallel.tensor.proven_table` gives it and keeps it."""

    def __init__(self, model: PreTrainedModel, cache: TableCache) -> None:
        self._model, self._cache = model, cache
        self._searches: dict[int, tuple[object, TableSearch]] = {}

    def find(self, degree: int, *, sequence: bool = False, whole: float | None = None) -> ShardingTable:
        """The table over ``degree`` ranks, as of :func:`shardwise.parallel.tensor.proven_table`.

        Raises:
            PlanError: as there.
        """
        known = self._cache.find(self._model.config, degree, sequence=sequence, whole=whole)
        if known is not None:
            return known

        def solve(small: nn.Module) -> ShardingTable:
            return self._search(degree, small).tables(sequence=sequence, whole=whole)[0]

        table = on_small_copy(self._model, degree, solve)
        self._cache.keep(self._model.config, table, sequence=sequence, whole=whole)
        return table

    def _search(self, degree: int, small: nn.Module) -> TableSearch:
        """That of an equal copy, where there was one: copies in another precision are others."""
        dtype = next(small.parameters()).dtype
        known = self._searches.get(degree)
        if known is None or known[0] != dtype:
            known = self._searches[degree] = dtype, TableSearch(self._model, small, degree)
        return known[1]
