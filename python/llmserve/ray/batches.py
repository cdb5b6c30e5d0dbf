"""Many prompts through Ray Data: an engine an actor, and a run that goes on where it was cut."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmserve.errors import InvalidArgument
from llmserve.llm import LLM
from llmserve.sampling_params import SamplingParams

_OUTPUTS = ("text", "finish_reason", "num_prompt_tokens", "num_tokens")


class Generate:
    """Continues the prompts of a batch: a callable class for `Dataset.map_batches`.

    Rows have `column` (texts; of "messages", conversations) and get `text`, `finish_reason`,
    `num_prompt_tokens`, `num_tokens` and `error`. A row that is refused has its reason in `error`,
    and the others of its batch their texts.
    """

    def __init__(
        self,
        model: str,
        engine: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        column: str = "prompt",
    ) -> None:
        self._llm = LLM(model, **{"seed": 0, **(engine or {})})
        self._params = SamplingParams(**(sampling or {}))
        self._column = column

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See Generate."""
        items = list(batch[self._column])
        rows: list[tuple[str, str, int, int, str]] = [("", "error", 0, 0, "")] * len(items)
        good, refused = self._sorted(items)
        for idx, reason in refused.items():
            rows[idx] = ("", "error", 0, 0, reason)
        if good:
            prompts = [items[idx] for idx in good]
            run = self._llm.chat if self._column == "messages" else self._llm.generate
            prompts = [_plain(prompt) for prompt in prompts]
            outputs = run(prompts, self._params, use_tqdm=False)
            for idx, output in zip(good, outputs, strict=True):
                (one,) = output.outputs[:1]
                num = len(output.prompt_token_ids)
                reason = str(one.finish_reason)
                rows[idx] = (one.text, reason, num, len(one.token_ids), one.error or "")
        made = {
            name: np.array([row[i] for row in rows], dtype=object if i in (0, 1, 4) else np.int64)
            for i, name in enumerate((*_OUTPUTS, "error"))
        }
        return {**batch, **made}

    def _sorted(self, items: list[Any]) -> tuple[list[int], dict[int, str]]:
        """Those that can run, and why the others cannot."""
        good, refused = [], {}
        for idx, item in enumerate(items):
            try:
                if self._column != "messages":
                    self._llm.check_text(str(item))
                    self._llm._admission.admit(str(item), self._params, 0)
                good.append(idx)
            except (InvalidArgument, ValueError) as error:
                refused[idx] = str(error)
        return good, refused

    def __del__(self) -> None:
        if (llm := getattr(self, "_llm", None)) is not None:
            llm.close()


def _plain(prompt: Any) -> Any:
    """Of numpy's arrays of records, what chat takes."""
    if isinstance(prompt, np.ndarray):
        return [dict(message) for message in prompt]
    return prompt


def batch(
    dataset: Any,
    model: str,
    *,
    engine: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    column: str = "prompt",
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 256,
    checkpoint: str | None = None,
    id_column: str = "id",
    **options: Any,
) -> Any:
    """A Ray dataset with the prompts' continuations, `concurrency` engines at once.

    dataset: rows with `column`. engine: arguments of LLM, sampling: of SamplingParams. checkpoint:
    a folder that all nodes share, in which Ray notes finished rows as they are written
    (`write_parquet` and kin): a run that was cut, started again, computes what is missing. For
    that the rows come from files (`read_parquet` and kin), with a unique `id_column`. options: of
    `Dataset.map_batches` (num_cpus, num_gpus ...).
    """
    if checkpoint is not None:
        from ray.data.checkpoint import CheckpointConfig

        dataset.context.checkpoint_config = CheckpointConfig(
            id_column=id_column, checkpoint_path=checkpoint, delete_checkpoint_on_success=False
        )
    arguments = {"model": model, "engine": engine, "sampling": sampling, "column": column}
    if "num_cpus" not in options:
        options["num_cpus"] = (engine or {}).get("num_threads") or 1
    return dataset.map_batches(
        Generate,
        fn_constructor_kwargs=arguments,
        concurrency=concurrency,
        batch_size=batch_size,
        **options,
    )
