"""Libraries that people build on, each against a server of the demo model: what it sends is taken,
and what comes back it can read. Run with `pip install 'llmserve[clients]'` and `-m long`."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pydantic
import pytest
from llmserve import AsyncLLM
from serving import RunningServer, running_server

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),
]

ASK = "What is the weather in Rome?"


class Trip(pydantic.BaseModel):
    """A journey."""

    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"It is sunny in {city}."


def installed(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: llmserve[clients]")


@pytest.fixture(scope="module")
def open_server(demo: AsyncLLM) -> Any:
    """As a library finds it: any key, and fields that only its own servers know."""
    with running_server(demo, ["demo"], leniency="unknown_fields") as server:
        yield server


@pytest.fixture
def base_url(server: RunningServer) -> str:
    return f"http://127.0.0.1:{server.port}"


class TestLangChainOpenAI:
    """langchain-openai, over chats and over responses."""

    @pytest.fixture(params=[False, True], ids=["chats", "responses"])
    def model(self, request: pytest.FixtureRequest, base_url: str) -> Any:
        module = installed("langchain_openai")
        return module.ChatOpenAI(
            model="demo",
            base_url=base_url + "/v1",
            api_key="none",
            max_tokens=100,
            seed=None if request.param else 1,
            use_responses_api=request.param,
        )

    def test_it_asks(self, model: Any) -> None:
        answer = model.invoke(ASK)
        assert answer.text
        assert answer.usage_metadata["output_tokens"] > 0

    def test_it_streams(self, model: Any) -> None:
        chunks = list(model.stream(ASK))
        assert "".join(chunk.text for chunk in chunks)
        assert len(chunks) > 2

    def test_it_asks_for_records(self, model: Any) -> None:
        for method in ("json_schema", "function_calling"):
            answer = model.with_structured_output(Trip, method=method).invoke(ASK)
            assert isinstance(answer, Trip)

    def test_it_has_tools_called(self, model: Any) -> None:
        answer = model.bind_tools([weather], tool_choice="any").invoke(ASK)
        for call in answer.tool_calls:
            assert (call["name"], set(call["args"])) == ("weather", {"city"})
        messages = installed("langchain_core.messages")
        results = [
            messages.ToolMessage("It is sunny.", tool_call_id=call["id"])
            for call in answer.tool_calls
        ]
        assert answer.tool_calls
        assert model.invoke([messages.HumanMessage(ASK), answer, *results]) is not None

    def test_it_embeds(self, base_url: str) -> None:
        module = installed("langchain_openai")
        embeddings = module.OpenAIEmbeddings(
            model="demo",
            base_url=base_url + "/v1",
            api_key="none",
            check_embedding_ctx_length=False,
        )
        assert len(embeddings.embed_documents(["a", "b"])) == 2


class TestLangChainAnthropic:
    @pytest.fixture
    def model(self, base_url: str) -> Any:
        module = installed("langchain_anthropic")
        return module.ChatAnthropic(model="demo", base_url=base_url, api_key="none", max_tokens=100)

    def test_it_asks_and_streams(self, model: Any) -> None:
        assert model.invoke(ASK).text
        assert "".join(chunk.text for chunk in model.stream(ASK))

    def test_it_has_tools_called(self, model: Any) -> None:
        answer = model.bind_tools([weather], tool_choice="any").invoke(ASK)
        assert {call["name"] for call in answer.tool_calls} == {"weather"}


class TestLangChainOllama:
    @pytest.fixture
    def model(self, base_url: str) -> Any:
        module = installed("langchain_ollama")
        return module.ChatOllama(model="demo", base_url=base_url, num_predict=100)

    def test_it_asks_and_streams(self, model: Any) -> None:
        assert model.invoke(ASK).text
        assert "".join(chunk.text for chunk in model.stream(ASK))

    def test_it_asks_for_records(self, model: Any) -> None:
        answer = model.with_structured_output(Trip, method="json_schema").invoke(ASK)
        assert isinstance(answer, Trip)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic", "ollama_chat"])
class TestLiteLLM:
    """litellm, by the names of several providers."""

    @pytest.fixture(autouse=True)
    def own_url(self, provider: str, base_url: str) -> None:
        needs_v1 = provider in ("openai", "hosted_vllm")
        self.given = {
            "model": f"{provider}/demo",
            "api_base": base_url + ("/v1" if needs_v1 else ""),
            "api_key": "none",
            "messages": [{"role": "user", "content": ASK}],
            "max_tokens": 100,
        }

    def test_it_asks_and_streams(self) -> None:
        litellm = installed("litellm")
        answer = litellm.completion(**self.given)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0
        chunks = list(litellm.completion(**self.given, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def test_it_has_tools_called(self, provider: str) -> None:
        litellm = installed("litellm")
        if provider == "ollama_chat":
            pytest.skip("Ollama's protocol has no tool_choice")
        function = {"name": "weather", "parameters": Trip.model_json_schema()}
        answer = litellm.completion(
            **self.given,
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
        )
        for call in answer.choices[0].message.tool_calls:
            Trip.model_validate_json(call.function.arguments)


class TestInstructor:
    @pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
    def test_it_asks_for_records(self, server: RunningServer, mode: str) -> None:
        instructor = installed("instructor")
        client = instructor.from_openai(server.openai(), mode=instructor.Mode[mode])
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": ASK}],
            response_model=Trip,
            max_tokens=100,
            max_retries=1,
        )
        assert isinstance(answer, Trip)

    def test_it_asks_anthropics_protocol(self, base_url: str) -> None:
        instructor, anthropic = installed("instructor"), installed("anthropic")
        client = instructor.from_anthropic(
            anthropic.Anthropic(base_url=base_url, api_key="none"),
            mode=instructor.Mode.ANTHROPIC_TOOLS,
        )
        answer = client.messages.create(
            model="demo",
            messages=[{"role": "user", "content": ASK}],
            response_model=Trip,
            max_tokens=100,
            max_retries=1,
        )
        assert isinstance(answer, Trip)


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
class TestPydanticAI:
    """pydantic-ai, whose answers have types: a finish reason that it does not know ends it."""

    @pytest.fixture(autouse=True)
    def own_model(self, kind: str, base_url: str) -> None:
        models = installed("pydantic_ai.models.openai")
        providers = installed("pydantic_ai.providers.openai")
        provider = providers.OpenAIProvider(base_url=base_url + "/v1", api_key="none")
        self.model = getattr(models, kind)("demo", provider=provider)

    def agent(self, **options: Any) -> Any:
        return installed("pydantic_ai").Agent(
            self.model, model_settings={"max_tokens": 100}, **options
        )

    def test_it_asks_and_streams(self) -> None:
        assert self.agent().run_sync(ASK).output

        async def streamed() -> str:
            async with self.agent().run_stream(ASK) as answer:
                return str(await answer.get_output())

        assert asyncio.run(streamed())

    def test_it_asks_for_records(self) -> None:
        pydantic_ai = installed("pydantic_ai")
        assert isinstance(self.agent(output_type=Trip).run_sync(ASK).output, Trip)
        native = pydantic_ai.NativeOutput(Trip)
        assert isinstance(self.agent(output_type=native).run_sync(ASK).output, Trip)

    def test_a_time_limit_is_an_end_that_it_knows(self, demo: AsyncLLM) -> None:
        with running_server(demo, ["demo"], request_timeout=0.2) as server:
            providers = installed("pydantic_ai.providers.openai")
            url = f"http://127.0.0.1:{server.port}/v1"
            provider = providers.OpenAIProvider(base_url=url, api_key="none")
            model = type(self.model)("demo", provider=provider)
            settings = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
            agent = installed("pydantic_ai").Agent(model, model_settings=settings)
            assert agent.run_sync(ASK).output


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
class TestOpenAIAgents:
    @pytest.fixture(autouse=True)
    def own_model(self, kind: str, server: RunningServer) -> None:
        self.agents = installed("agents")
        self.agents.set_tracing_disabled(True)
        openai = installed("openai")
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
        self.model = getattr(self.agents, kind)("demo", openai_client=client)

    def run(self, max_turns: int = 1, **options: Any) -> Any:
        settings = self.agents.ModelSettings(max_tokens=100, **options.pop("settings", {}))
        agent = self.agents.Agent(name="a", model=self.model, model_settings=settings, **options)

        async def run() -> Any:
            return await self.agents.Runner.run(agent, ASK, max_turns=max_turns)

        return asyncio.run(run())

    def test_it_asks(self) -> None:
        assert self.run(instructions="Be brief.").final_output

    def test_it_asks_for_records(self) -> None:
        assert isinstance(self.run(output_type=Trip).final_output, Trip)

    def test_it_has_tools_called(self) -> None:
        called: list[str] = []

        @self.agents.function_tool
        def weather(city: Literal["Rome", "Oslo"]) -> str:
            """The weather in a city."""
            called.append(city)
            return "It is sunny."

        answer = self.run(
            tools=[weather],
            settings={"tool_choice": "required"},
            tool_use_behavior="stop_on_first_tool",
        )
        assert answer.final_output == "It is sunny."
        assert called

    def test_it_streams(self) -> None:
        async def run() -> str:
            settings = self.agents.ModelSettings(max_tokens=50)
            agent = self.agents.Agent(name="a", model=self.model, model_settings=settings)
            result = self.agents.Runner.run_streamed(agent, ASK, max_turns=1)
            text = ""
            async for event in result.stream_events():
                if event.type == "raw_response_event":
                    text += getattr(event.data, "delta", "") or ""
            return text

        assert asyncio.run(run())


def test_what_only_openais_servers_know_may_be_left_out(open_server: RunningServer) -> None:
    """Fields of a client that is newer than the server."""
    client = open_server.openai()
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": ASK}],
        max_tokens=5,
        extra_body={"verbosity": "low", "prediction": {"type": "content", "content": "x"}},
    )
    assert json.loads(answer.model_dump_json())["choices"]
