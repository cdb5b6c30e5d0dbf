"""The models that a server has, by the names that clients know."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmserve.async_llm import AsyncLLM
from llmserve.sampling_params import SamplingParams
from llmserve.server.http.errors import ApiError
from llmserve.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model, loaded."""

    names: Sequence[str]  # the first is the one that answers carry
    llm: AsyncLLM
    created: int = field(default_factory=lambda: int(time.time()))
    aliases: Sequence[str] = ()  # taken in requests, and told nowhere

    @property
    def default_params(self) -> SamplingParams:
        """The model's own, over which what a request gives goes. Not to be changed."""
        return self.llm.default_sampling_params

    @property
    def name(self) -> str:
        """What answers call it."""
        return self.names[0]

    def tokenizer(self) -> Tokenizer:
        """Raises ApiError if it has none."""
        if not self.llm.has_tokenizer:
            raise ApiError(
                422, f"the model {self.name!r} has no tokenizer; send token ids", param="model"
            )
        return self.llm.get_tokenizer()


class Models:
    """All of them; the first is taken where a request names none."""

    def __init__(self, models: Sequence[ServedModel], takes_any_name: bool = False) -> None:
        """takes_any_name: a name that is not served stands for the first model."""
        self._models = list(models)
        self._takes_any_name = takes_any_name
        self._by_name: Mapping[str, ServedModel] = {
            name: model for model in models for name in model.names
        }
        self._by_alias = {name: model for model in models for name in model.aliases}

    def get(self, name: str | None) -> ServedModel:
        """Raises ApiError (404) for a name that is not served."""
        if name is None:
            return self._models[0]
        model = self._by_name.get(name) or self._by_alias.get(name)
        if model is None and self._takes_any_name:
            return self._models[0]
        if model is None:
            served = ", ".join(self._by_name)
            raise ApiError(
                404,
                f"there is no model {name[:200]!r}; this server has: {served}",
                param="model",
                code="model_not_found",
            )
        return model

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def by_name(self) -> Mapping[str, ServedModel]:
        """Every name."""
        return self._by_name
