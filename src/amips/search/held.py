"""What an index of cells and one of a graph can both do, beside searching."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from amips.search.auditing import Audit
    from amips.search.memory_searcher import Index


class SavedIndex:
    """An index that is saved in a bundle, and whose recall can be measured again on new queries."""

    def save(self, path: str | Path) -> None:
        """Write a bundle, or replace one (`amips.search.save`); `amips.load(path)` opens it again."""
        from amips.search.bundle import save  # which is about indexes, and so knows them

        save(cast("Index", self), path)

    def audit(
        self,
        queries: Any,
        *,
        sample: int = 500,
        recall: float | None = None,
        seed: int = 0,
        on_bad: Literal["error", "skip"] = "error",
        threads: int | None = None,
    ) -> "Audit":
        """What recall does it have on queries of now? A sample of them is searched for exactly.

        Args:
            queries: [m, d], an array or a file; not those it was fitted on.
            sample: queries to search for exactly, at most, drawn at random.
            recall: what is asked of the index; by default what it was made for.
            seed: of the draw.
            on_bad: a query that is not finite is an error, or ("skip") left out.
            threads: limit on them.
        """
        from amips.search.auditing import audit

        options: Any = {"sample": sample, "recall": recall, "seed": seed, "on_bad": on_bad}
        return audit(cast("Index", self), queries, threads=threads, **options)
