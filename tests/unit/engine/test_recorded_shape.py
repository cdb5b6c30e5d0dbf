"""Which steps a device records, and for which shape: the host's side of CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
from llmserve import _core_testing
from scripted import Runner

LAUNCH = _core_testing.cuda_launch


def shape_of_decode(runner: Runner, *, draws: bool = True) -> tuple[int, int] | None:
    """Of the step after the prompts', in blocks of four."""
    runner.step()
    plan = runner.scheduler.schedule()
    shape: tuple[int, int, int, bool] | None = LAUNCH.recorded_shape(plan, 8, 1024, 4)
    if shape is None:
        return None
    assert shape[2:] == (0, draws)
    return shape[:2]


def test_rows_are_exact_up_to_eight_then_fill_steps_of_8_and_32_up() -> None:
    counts = (1, 5, 8, 9, 16, 17, 255, 256, 257, 300)
    rows = [LAUNCH.num_recorded_rows(n, 1000) for n in counts]
    assert rows == [1, 5, 8, 16, 16, 24, 256, 256, 288, 320]
    assert LAUNCH.num_recorded_rows(27, 30) == 30  # never more than there can be


def test_every_batch_fits_and_few_shapes_serve_all() -> None:
    rows = [LAUNCH.num_recorded_rows(n, 512) for n in range(1, 513)]
    assert all(n <= r for n, r in enumerate(rows, 1))
    assert rows == sorted(rows)
    assert len(set(rows)) == 8 + 31 + 8


def test_contexts_double_up_to_the_models_longest() -> None:
    contexts = [LAUNCH.recorded_context(n, 1000) for n in (1, 256, 257, 512, 513, 1000)]
    assert contexts == [256, 256, 512, 512, 1000, 1000]
    assert LAUNCH.recorded_context(5, 96) == 96


def test_a_batch_of_single_tokens_is_recorded() -> None:
    runner = Runner(num_blocks=64)
    for request_id in range(3):
        runner.add(request_id, [1, 2, 3], max_tokens=8)
    assert shape_of_decode(runner) == (3, 256 // 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 1},
        {"presence_penalty": 0.5},
        {"min_tokens": 4, "stop_token_ids": [3]},
        {"beam_width": 2},
    ],
    ids=str,
)
def test_a_row_that_asks_for_more_leaves_the_drawing_out_of_it(fields: dict[str, Any]) -> None:
    runner = Runner(num_blocks=64)
    runner.add(0, [1, 2, 3], max_tokens=8)
    runner.add(1, [1, 2, 4], max_tokens=8, **fields)
    rows = 3 if "beam_width" in fields else 2
    assert shape_of_decode(runner, draws=False) == (rows, 256 // 4)


def shape_with_guesses(*counts: int) -> tuple[int, int, int, bool] | None:
    """Of a step of as many sequences, with so many guesses each."""
    runner = Runner(num_blocks=256, max_num_batched_tokens=64)
    for request_id in range(len(counts)):
        runner.add(request_id, [1, 2, 3], max_tokens=30, has_drafter=True)
    runner.step()
    sampled = runner.model.execute(runner.scheduler.schedule())
    runner.scheduler.commit(sampled)
    for request_id, count in enumerate(counts):
        if count > 0:
            _core_testing.draft_ready(runner.scheduler, request_id, 0, 5, [1] * count)
    shape: tuple[int, int, int, bool] | None = LAUNCH.recorded_shape(
        runner.scheduler.schedule(), 8, 1024, 4
    )
    return shape


def test_tokens_with_guesses_behind_them_are_recorded_by_how_many_they_are() -> None:
    few = [(1,), (4,), (0, 3), (3, 0), (1, 2), (2, 1), (1, 1, 2), (0, 0, 0, 4)]
    shapes = [shape_with_guesses(*counts) for counts in few]
    assert [shape[0] for shape in shapes if shape] == [len(c) + sum(c) for c in few]
    assert len(set(shapes)) == len(few)
    assert shape_with_guesses(0, 0) == (2, 64, 0, True)
    many = shape_with_guesses(4, 4, 4)
    assert many is not None
    assert many[:2] == (15, 64)
    assert shape_with_guesses(4, 4, 3) is None  # too many shapes would come


def test_a_prompt_keeps_its_step_from_it_unless_one_token_is_left_of_it() -> None:
    runner = Runner(num_blocks=64, max_num_batched_tokens=8)
    runner.add(0, list(range(9)), max_tokens=8)
    assert LAUNCH.recorded_shape(runner.scheduler.schedule(), 8, 1024, 4) is None
    runner = Runner(num_blocks=64, max_num_batched_tokens=8)
    runner.add(0, list(range(9)), max_tokens=8)
    assert shape_of_decode(runner) == (1, 64)


def test_the_shape_used_longest_ago_gives_way() -> None:
    assert LAUNCH.new_keys([1, 2, 1, 3, 1, 2, 3], 2) == [1, 2, 3, 2, 3]
    assert LAUNCH.new_keys([1, 2, 3, 1, 2, 3], 3) == [1, 2, 3]
