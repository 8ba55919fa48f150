"""The memory of a design: what the log has asked, and what that found."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from amips.search import DIMENSIONS, GraphSearcher, Memory, Searcher, Snapshot, with_facts, with_memory
from amips.vectors import first_equal

if TYPE_CHECKING:
    from amips.builder.builder import Builder


def memory_of(builder: "Builder", depth: int) -> Memory:
    """The distinct training queries of a task, with so many top keys of each; nothing is recognised yet."""
    train = builder.task.train
    distinct = np.flatnonzero(first_equal(train.vectors) == np.arange(len(train)))
    projection = builder.projection(min(DIMENSIONS, builder.task.d))
    top = np.asarray(train.top_ids)[distinct, :depth]
    return Memory.build(train.vectors.take(distinct), top, projection.queries, builder.seed)


def remembering(builder: "Builder", index: Searcher | GraphSearcher, depth: int) -> Snapshot:
    """The index with a memory of the log in front of it; as it is, if that does not pay on val."""
    better = with_memory(index, memory_of(builder, depth), builder.task.val, builder.recall)
    if better is None:
        return index
    design = index.design
    return better if design is None else with_facts(better, design=replace(design, memory=depth))
