"""Replicas that stand by: who serves as others come, die and fill up."""

from __future__ import annotations

from llmserve.ray.standby import Standby


def test_one_that_dies_is_stood_in_for_and_nobody_else_moves() -> None:
    standby = Standby(2)
    standby.update(["c", "b", "a"])
    assert standby.serving == ["a", "b"]
    standby.update(["b", "c"])
    assert standby.serving == ["b", "c"]
    standby.update(["b", "c", "a2"])  # in its place there is a new one, which stands by
    assert standby.serving == ["b", "c"]
    standby.update(["a2"])
    assert standby.serving == ["a2"]


def test_without_a_number_all_serve() -> None:
    standby = Standby(0)
    standby.update(["b", "a"])
    standby.balance({"a": 99, "b": 99}, 4)
    assert standby.serving == ["a", "b"]


def test_the_load_wants_it_and_lets_it_go() -> None:
    standby = Standby(1)
    standby.update(["a", "b", "c"])
    standby.balance({"a": 3, "b": 0, "c": 0}, 4)
    assert standby.serving == ["a"]
    standby.balance({"a": 4, "b": 0, "c": 0}, 0)  # seats are not known
    assert standby.serving == ["a"]
    standby.balance({"a": 4, "b": 0, "c": 0}, 4)
    assert standby.serving == ["a", "b"]
    standby.balance({"a": 2, "b": 1, "c": 0}, 4)
    assert standby.serving == ["a", "b"]
    standby.balance({"a": 1, "b": 1, "c": 0}, 4)
    assert standby.serving == ["a"]
