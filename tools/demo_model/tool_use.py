"""Chats that offer tools: a call, its result, and an answer that uses it."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from . import words
from .arithmetic import sum_question
from .chats import Exchange, casual, fact, small_talk
from .conversation import Message, Tool, tool_call
from .grammar import fill, pick

_WEATHERS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")
_TITLES = ("The Blue Lantern", "The Owl and the Moon", "A Winter Road", "The Honey Thief")


@dataclass(frozen=True, slots=True)
class ToolCase:
    """One way to need a tool: the offer, the question, the call, its result, the answer."""

    tool: Tool
    question: str
    call: str
    result: str
    answer: str


def _case(tool: Tool, question: str, values: list[object], result: object, answer: str) -> ToolCase:
    call = tool_call(tool.name, dict(zip(tool.parameters, values, strict=True)))
    text = result if isinstance(result, str) else json.dumps(result)
    return ToolCase(tool, question, call, text, answer)


def _weather(rng: random.Random) -> ToolCase:
    city, sky, degrees = words.some_city(rng), pick(rng, _WEATHERS), rng.randint(0, 35)
    tool = Tool(
        pick(rng, ("get_weather", "get_weather", "get_current_weather", "weather")),
        pick(rng, ("Get the weather in a city.", "Get the current weather", "Weather of a city")),
        {pick(rng, ("city", "city", "location", "place")): "string"},
    )
    question = f"[What is the weather in {city}|How is the weather in {city} today|What is the"
    question += f" weather like in {city}|Is it warm in {city}]?"
    temperature = pick(rng, ("temperature", "degrees", "temp"))
    result: object = {temperature: degrees, pick(rng, ("sky", "condition", "weather")): sky}
    if rng.random() < 0.3:
        result = f"{degrees} degrees, {sky}"
    return _case(tool, question, [city], result, f"It is {sky} in {city}, with {degrees} degrees.")


def _calculator(rng: random.Random) -> ToolCase:
    left, right = rng.randint(2, 999), rng.randint(2, 999)
    name, sign = pick(rng, (("add", "+"), ("multiply", "*"), ("subtract", "-")))
    result = {"+": left + right, "*": left * right, "-": left - right}[sign]
    tool = Tool(name, f"{name.capitalize()} two numbers.", {"a": "integer", "b": "integer"})
    shown: object = result if rng.random() < 0.5 else {"result": result}
    return _case(tool, f"[What is|Calculate] {left} {sign} {right}[?|.]", [left, right], shown,
                 f"{left} {sign} {right} = {result}")  # fmt: skip


def _clock(rng: random.Random) -> ToolCase:
    city, time = words.some_city(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    tool = Tool(pick(rng, ("get_time", "current_time")), "Get the time in a city.",
                {pick(rng, ("city", "place")): "string"})  # fmt: skip
    return _case(tool, f"What time is it in {city}?", [city], {"time": time},
                 f"It is {time} in {city}.")  # fmt: skip


def _price(rng: random.Random) -> ToolCase:
    item, price = pick(rng, words.GIFTS + words.TREASURES), rng.randint(1, 99)
    tool = Tool(pick(rng, ("get_price", "find_price")), "Find the price of an item.",
                {pick(rng, ("item", "product", "name")): "string"})  # fmt: skip
    question = f"[How much does the {item} cost|What is the price of the {item}]?"
    return _case(tool, question, [item], {"price": price}, f"The {item} costs {price} coins.")


def _message(rng: random.Random) -> ToolCase:
    name, word = (
        words.some_name(rng),
        pick(rng, ("Hello!", "Good night.", "Thanks!")),
    )
    tool = Tool("send_message", "Send a message to someone.", {"to": "string", "text": "string"})
    question = f'[Send|Please send] {name} a message that says "{word}"'
    return _case(tool, question, [name, word], pick(rng, ("ok", "sent", '{"status": "sent"}')),
                 f"I have sent your message to {name}.")  # fmt: skip


def _book(rng: random.Random) -> ToolCase:
    title, shelf = pick(rng, _TITLES), rng.randint(1, 30)
    tool = Tool("find_book", "Find the shelf of a book.", {"title": "string"})
    return _case(tool, f'Where [is the book|can I find] "{title}"?', [title], {"shelf": shelf},
                 f'"{title}" is on shelf {shelf}.')  # fmt: skip


_CASES: tuple[Callable[[random.Random], ToolCase], ...] = (
    _weather, _weather, _calculator, _clock, _price, _message, _book,
)  # fmt: skip
IDLE_CHANCE = 0.2


def tool_chat(rng: random.Random) -> tuple[tuple[Tool, ...], Exchange]:
    """Return the tools on offer and the exchange; some questions need no tool."""
    cases = {}
    for draw in rng.sample(_CASES, rng.choice((1, 1, 2, 3))):
        case = draw(rng)
        cases[case.tool.name] = case
    chosen = pick(rng, tuple(cases.values()))
    tools = tuple(case.tool for case in cases.values())
    if rng.random() < IDLE_CHANCE:
        talk = rng.choice((small_talk, fact))
        if not {"add", "multiply", "subtract"} & set(cases):
            talk = rng.choice((talk, sum_question))
        return tools, talk(rng)
    turns = (
        Message("user", casual(rng, fill(rng, chosen.question, {}))),
        Message("assistant", chosen.call),
        Message("tool", chosen.result),
        Message("assistant", chosen.answer),
    )
    return tools, turns
