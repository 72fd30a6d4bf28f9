"""Batching of concurrent requests into one forward pass."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from posterity.cli.frame.folders import Run
from posterity.cli.frame.predictions import predicted_columns
from posterity.cli.frame.sources import Source
from posterity.cli.serving.rows import EncodedRows
from posterity.datasets import DataSet, LabelledData
from posterity.posteriors import Posterior
from posterity.posteriors.standalone import PredictiveModule
from posterity.predictive import Predictive

MOST_ROWS = 8192
"""Most rows of a pass over several requests; a single request may have more."""
FEW_ROWS = 64
BRIEF = 0.005
"""Seconds below which a pass of few rows runs in the event loop, since a thread would cost as much.

A pass in the thread is measured in CPU seconds, as other threads slow it down; one in the event loop by the clock.
"""


class Waiting(NamedTuple):
    """A request that waits for its predictions."""

    asked: EncodedRows
    answer: "asyncio.Future[dict[str, list[Any]]]"


class Model:
    """The model of a run; where its posterior predicts by draws, these are made once."""

    def __init__(self, run: Run) -> None:
        """Take the run."""
        self.run = run
        nothing = LabelledData(torch.zeros(0, 1), torch.zeros(0, 1))
        self._units = Source(DataSet("rows", run.config["task"], nothing, nothing), preprocessing=run.preprocessing)
        self._module: PredictiveModule | None = None
        if isinstance(run.posterior, Posterior) and run.posterior.by_draws:
            self._module = run.posterior.predictor()

    def predict(self, inputs: torch.Tensor) -> Predictive:
        """Return the predictive at encoded inputs (N, D), the same as `posterity predict` uses."""
        if self._module is not None:
            known: Predictive | None = self._module.predictive(inputs.to(self.run.posterior.joint.device))  # type: ignore[union-attr]
            if known is not None:
                return known
        return self.run.posterior.predict(inputs)

    @torch.inference_mode()
    def answers(self, requests: list[EncodedRows]) -> list[dict[str, list[Any]]]:
        """Return the predictions of several requests, by column, from one pass."""
        inputs = [asked.inputs for asked in requests]
        predictive = self.predict(inputs[0] if len(inputs) == 1 else torch.cat(inputs))
        classes = self.run.config["classes"]
        by_level = {
            level: predicted_columns(self._units, classes, predictive, level, ())
            for level in {asked.level for asked in requests}
        }
        results, low = [], 0
        for asked in requests:
            high = low + len(asked)
            own = {name: values[low:high] for name, values in by_level[asked.level].items()}
            results.append(own if asked.outside is None else {**own, "outside": asked.outside})
            low = high
        return results


class Batcher:
    """Gathers requests that arrive within a short window, and answers them by one pass, in a thread if it is long.

    A request waits only while others are arriving: being read, but not yet queued.
    """

    def __init__(self, model: Model, window: float) -> None:
        """Take the model, and the seconds that the first request of a pass may wait for others."""
        self._model, self._window = model, window
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "posterity-predict")
        self._task: asyncio.Task[None] | None = None
        self._brief = False
        self._waiting = 0
        self.arriving = 0
        self.passes = 0

    async def stop(self) -> None:
        """Stop, when all requests have been answered."""
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown()

    async def ask(self, asked: EncodedRows) -> dict[str, list[Any]]:
        """Return the predictions of a request, immediately if passes are brief and no other request is arriving."""
        if self._brief and not (self.arriving or self._waiting) and len(asked) <= FEW_ROWS:
            self.passes += 1
            return self._timed(time.perf_counter, [asked])[0]
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        waiting = Waiting(asked, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(waiting)
        self._waiting += 1
        try:
            return await waiting.answer
        finally:
            self._waiting -= 1

    async def _run(self) -> None:
        while True:
            group = await self._gathered()
            self.passes += 1
            await self._answer(group)

    async def _gathered(self) -> list[Waiting]:
        group = [await self._queue.get()]
        end = asyncio.get_running_loop().time() + self._window
        count = len(group[0].asked)
        while count < MOST_ROWS:
            if self._queue.empty():
                left = end - asyncio.get_running_loop().time()
                if not self.arriving or left <= 0:
                    break
                try:
                    group.append(await asyncio.wait_for(self._queue.get(), left))
                except TimeoutError:
                    break
            else:
                group.append(self._queue.get_nowait())
            count += len(group[-1].asked)
        return group

    async def _answer(self, group: list[Waiting]) -> None:
        """Answer a group; if the pass fails, answer each request separately, so that only the faulty one fails."""
        asked = [each.asked for each in group]
        try:
            if self._brief and sum(map(len, asked)) <= FEW_ROWS:
                results = self._timed(time.perf_counter, asked)
            else:
                results = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._timed, time.thread_time, asked
                )
        except Exception as error:
            if len(group) > 1:
                for each in group:
                    await self._answer([each])
            elif not group[0].answer.done():
                group[0].answer.set_exception(error)
            return
        for each, result in zip(group, results, strict=True):
            if not each.answer.done():
                each.answer.set_result(result)

    def _timed(self, clock: Callable[[], float], asked: list[EncodedRows]) -> list[dict[str, list[Any]]]:
        """Return the predictions of several requests, and note whether passes of few rows are brief."""
        begin = clock()
        results = self._model.answers(asked)
        if sum(map(len, asked)) <= FEW_ROWS:
            self._brief = clock() - begin < BRIEF
        return results
