"""The output of a response: items of reasoning, text and calls, and the events of a stream that
tell how they come about."""

import hashlib
from collections.abc import Iterator
from typing import Any

from llmserve.parsers.deltas import Pieces, ToolCallDelta, is_new_call_id

Event = dict[str, Any]


class OutputItems:
    """Made of a message's pieces as they come. Its events have no numbers yet. Ids are functions of
    the response's own, so that they are the same where it goes on elsewhere."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last one, until it has ended
        self._logprobs: list[Any] = []  # that no event of text has told

    def add(self, pieces: Pieces, logprobs: list[Any]) -> Iterator[Event]:
        """logprobs: of the tokens that the pieces are made of."""
        self._logprobs += logprobs
        if pieces.reasoning:
            yield from self._add_text("reasoning", pieces.reasoning)
        if pieces.content:
            yield from self._add_text("message", pieces.content)
        for call in pieces.tool_calls:
            yield from self._add_call(call)

    def finish(self, status: str) -> Iterator[Event]:
        """Ends the last item. status: "completed", or "incomplete" where it was cut."""
        yield from self._close(status)

    def _add_text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._begin_text(kind)
        assert self._open is not None
        (part,) = self._open["content"]
        part["text"] += text
        event: Event = {**self._part_event(_WORDS[kind] + ".delta"), "delta": text}
        if kind == "message":
            part["logprobs"] += self._logprobs
            event["logprobs"], self._logprobs = self._logprobs, []
        yield event

    def _begin_text(self, kind: str) -> Iterator[Event]:
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            part["logprobs"] = []
            item: dict[str, Any] = {"id": self._id("msg_"), "type": kind, "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": self._id("rs_"), "type": kind, "summary": []}
        yield from self._begin({**item, "status": "in_progress", "content": []})
        self._open_item["content"].append(part)
        yield {**self._part_event("response.content_part.added"), "part": dict(part)}

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id is not None:
            yield from self._close("completed")
            item = {
                "id": self._id("fc_"),
                "type": "function_call",
                "call_id": self._id("call_") if is_new_call_id(call.id) else call.id,
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            yield from self._begin(item)
        if call.arguments and self._open_item["type"] == "function_call":
            self._open_item["arguments"] += call.arguments
            kind = "response.function_call_arguments.delta"
            yield {**self._item_event(kind), "delta": call.arguments}

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self.items.append(item)
        self._open = item
        yield {**self._index_event("response.output_item.added"), "item": _copy(item)}

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item = self._open
        item["status"] = status
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {**self._item_event(kind), **done}
        else:
            (part,) = item["content"]
            text = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield {**self._part_event(_WORDS[item["type"]] + ".done"), **text}
            yield {**self._part_event("response.content_part.done"), "part": dict(part)}
        yield {**self._index_event("response.output_item.done"), "item": _copy(item)}
        self._open = None

    def _id(self, prefix: str) -> str:
        """Of the item that begins."""
        data = f"{self._response_id}/{prefix}{len(self.items)}".encode()
        return prefix + hashlib.sha256(data).hexdigest()[:32]

    @property
    def _open_item(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open

    def _index_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1}

    def _item_event(self, kind: str) -> Event:
        return {**self._index_event(kind), "item_id": self._open_item["id"]}

    def _part_event(self, kind: str) -> Event:
        return {**self._item_event(kind), "content_index": 0}


_WORDS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: what comes later is added to its parts."""
    if "content" not in item:
        return dict(item)
    return {**item, "content": [dict(part) for part in item["content"]]}
