"""Events gathered into outputs, by one thread while another makes log-probabilities."""

import threading
from types import SimpleNamespace
from typing import Any, cast

from llmserve import SamplingParams
from llmserve.requests.prompt_parser import Prompt
from llmserve.requests.state import RequestState

DEADLINE_S = 30


def test_an_output_waits_for_rows_that_another_thread_makes() -> None:
    """As where a request's time is over while its rows are made: none is lost or out of order."""
    may_go_on, has_begun = threading.Event(), threading.Event()

    class Event:
        """Of one token, which is its log-probability, too."""

        request_id = sample_index = 0
        text, error, top_logprobs, finish_reason, stop_reason = "", "", [[]], None, None
        seed = num_cached_tokens = num_preemptions = 0
        is_request_finished = False

        def __init__(self, token_id: int) -> None:
            self.token_ids = [token_id]

        @property
        def logprobs(self) -> list[Any]:
            (token_id,) = self.token_ids
            if token_id == 0:
                has_begun.set()
                assert may_go_on.wait(DEADLINE_S)
            return [SimpleNamespace(token_id=token_id, logprob=-float(token_id), rank=1)]

    params = SamplingParams(logprobs=0, detokenize=False)
    state = RequestState(Prompt(None, [1]), params, cast(Any, None), 0, None)
    for token_id in range(5):
        state.apply(cast(Any, Event(token_id)))
    maker = threading.Thread(target=state.make_rows)
    maker.start()
    assert has_begun.wait(DEADLINE_S)
    outputs: list[list[int]] = []
    reader = threading.Thread(
        target=lambda: outputs.append([next(iter(row)) for row in _logprobs(state)])
    )
    reader.start()
    reader.join(0.05)
    may_go_on.set()
    for thread in (maker, reader):
        thread.join(DEADLINE_S)
    assert outputs == [[0, 1, 2, 3, 4]]


def _logprobs(state: RequestState) -> list[dict[int, Any]]:
    (completion,) = state.completions()
    assert completion.logprobs is not None
    return completion.logprobs
