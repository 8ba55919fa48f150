"""Questions in words: those that wait together are encoded, and searched for, together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amips.errors import AmipsError
from amips.serving.batching import Batcher, Results
from amips.text import Answer, Asker
from amips.vectors import Floats

MOST_WAITING = 32


class Questions:
    """What answers questions, in a thread of its own.

    Args:
        asker: gives what answers them now; `Refused` if nothing does.
        together: as of `Batcher`.
    """

    def __init__(self, asker: Callable[[], Asker], *, together: bool) -> None:
        self._asker, self._batcher = asker, Batcher(self._answer, MOST_WAITING, together=together)

    async def ask(self, question: str, options: dict[str, Any], seconds: float) -> Answer:
        """The texts that answer a question."""
        answer: Answer = await self._with_others(question, options, seconds)
        return answer

    async def encode(self, question: str, seconds: float) -> Floats:
        """The vector of a question, [1, d]."""
        row: Floats = await self._with_others(question, None, seconds)
        return row[None]

    async def close(self) -> None:
        """Finish what is under way."""
        await self._batcher.close()

    async def _with_others(self, question: str, options: dict[str, Any] | None, seconds: float) -> Any:
        self._asker()
        x: NDArray[Any] = np.array([[question]], object)
        key = None if options is None else tuple(options.items())
        (answer,) = (await self._batcher.search(x, options, key, seconds)).scores
        if isinstance(answer, AmipsError):
            raise answer
        return answer

    def _answer(self, x: NDArray[Any], options: dict[str, Any] | None) -> Results:
        """The answers to questions [m, 1], or their vectors where no options are given; or errors."""
        asker, questions = self._asker(), x[:, 0].tolist()
        call: Any = asker.encoded_many if options is None else partial(asker.ask_many, **options)
        answers = np.empty(len(questions), object)
        try:
            for i, answer in enumerate(call(questions)):
                answers[i] = answer
        except AmipsError as problem:
            if len(questions) == 1:
                answers[0] = problem
            else:  # what is wrong with one of them is not with the others
                answers = np.concatenate([self._answer(row[None], options)[0] for row in x])
        return answers, answers
